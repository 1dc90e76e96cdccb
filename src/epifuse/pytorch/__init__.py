"""What registers with PyTorch: gradients of epilogues."""
