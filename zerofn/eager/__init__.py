"""The optimizer that `zf.attach` returns."""
