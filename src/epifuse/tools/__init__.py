"""Around the library: the command line, the demo, pictures, tests' measures."""
