"""The public names of the package by themselves: they are imported when they are asked for."""

import zerofn as zf

NAMES = {name: getattr(zf, name) for name in zf.__all__}
