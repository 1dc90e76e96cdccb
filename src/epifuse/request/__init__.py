"""The request of a call: tensors, operands, options, and the signature that describes them."""
