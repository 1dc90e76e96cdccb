"""Tools around the library: the command line, the demo, pictures, and comparisons of results for tests."""
