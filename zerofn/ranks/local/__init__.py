"""Ranks on this machine: `zf.launch`."""
