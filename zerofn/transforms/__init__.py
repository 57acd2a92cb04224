"""The transforms of the library: one file, one transform."""
