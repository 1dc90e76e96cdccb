"""In PyTorch's compiler and autograd. Nothing else of epifuse registers anything with torch."""
