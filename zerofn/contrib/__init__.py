"""Features that few people need, written on the public names; nothing else in the package imports them.

`zerofn/__init__.py` imports public names from here when they are asked for. `tests/test_imports.py` lists the private
names that a module here imports all the same, with the reason.
"""
