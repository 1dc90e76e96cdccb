"""Kernels, one file each: a main loop and what it needs."""
