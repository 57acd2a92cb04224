"""The scripts here are run by `test_frameworks.py`, and import frameworks that need not be installed."""

from pathlib import Path

collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]
