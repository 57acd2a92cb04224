"""Sharded parameters: all-gathered on use, with gradients reduced in buckets during backward."""
