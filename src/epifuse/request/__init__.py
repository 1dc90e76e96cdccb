"""What was asked: tensors, operands, options, and the signature that describes them."""
