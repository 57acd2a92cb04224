"""What few people need, written on the public names: nothing in the package imports it.

`zerofn/__init__.py` finds public names here when they are asked for. What a module takes from the inside of the package
all the same stands in `tests/test_imports.py`, with the reason.
"""
