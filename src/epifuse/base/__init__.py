"""Modules that all other packages use and that use none of them: errors, dtypes, targets, caches, the store on disk."""
