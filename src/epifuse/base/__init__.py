"""What every part needs and that needs no other: errors, dtypes, targets, caches, the store on disk."""
