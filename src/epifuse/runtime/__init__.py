"""Caches and launches."""
