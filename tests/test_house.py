"""Files, classes and functions of the package are small enough to be read at once, docstrings and all."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "zerofn"
LIMITS = {ast.ClassDef: 150, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}
LINES = 300


def too_long(name: str, text: str) -> list[str]:
    """What is above a limit, each with its line and its length."""
    found = [
        (n.lineno, n.name, n.end_lineno - n.lineno + 1, LIMITS[type(n)])
        for n in ast.walk(ast.parse(text))
        if type(n) in LIMITS
    ]
    wrong = [
        f"{name}:{line}: {what} has {length} lines of {limit}" for line, what, length, limit in found if length > limit
    ]
    length = len(text.splitlines())
    return wrong + ([f"{name} has {length} lines of {LINES}"] if length > LINES else [])


def test_files_classes_and_functions_are_short():
    files = {str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8") for p in sorted(PACKAGE.rglob("*.py"))}
    assert len(files) > 200
    assert not [told for name, text in files.items() for told in too_long(name, text)]


@pytest.mark.parametrize(("head", "most"), [("class Long:", 150), ("def long():", 60), ("async def long():", 60)])
def test_a_line_too_many_is_found(head, most):
    body = "\n    x = 1"
    assert not too_long("a.py", head + body * (most - 1))
    (told,) = too_long("a.py", head + body * most)
    assert told.endswith(f"has {most + 1} lines of {most}")


def test_a_docstring_counts_and_so_do_methods():
    text = "class C:\n    def f(self):\n" + '        """' + "\n" * 60 + '        """'
    assert too_long("a.py", text) == ["a.py:2: f has 62 lines of 60"]


def test_a_file_of_a_line_too_many_is_found():
    assert not too_long("a.py", "x = 1\n" * 300)
    assert too_long("a.py", "x = 1\n" * 301) == ["a.py has 301 lines of 300"]
