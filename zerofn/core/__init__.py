"""Transforms, and how a chain of them is surveyed and run."""
