"""Wrong programs in a table: each raises the error that its row names, with the row's words, in the project's form.

    WRONG = Refusals()
    WRONG.rows(ValueError, (lambda: zf.adamw(lr=-1.0), "adamw(lr=-1.0)", "must lie in [0, inf)"))

    @WRONG(ValueError, "b: is the very tensor that stands at a")
    def one_gradient_at_two_tied_places():
        state = ...
        yield state  # What comes behind is wrong, and the state is afterwards what it was.
        zf.update(...)

    @WRONG(ValueError, "of shape {}", over=[(2,), (3,)])
    def leaves_of_another_shape(shape):
        ...

    @pytest.mark.parametrize("row", WRONG)
    def test_refused(row, tmp_path):
        row.check(tmp_path=tmp_path)

A program is called with its value of `over`, for each of which there is a row, and with the fixtures that it names.
What stands in front of `yield` must not raise. What is yielded is compared before and after: a tree, a function that
gives one, a `Kept` that goes on afterwards, or nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zerofn
from zerofn.testing import assert_trees_equal, clone

PACKAGE = Path(zerofn.__file__).parent

# What is wrong; why, or a row for each leaf; what to write. Unknown keywords are told in one line.
FORM = re.compile(r"(?s).+?\n  \S.*\n  write: \S|.*\(\) (has no keyword|needs) ")
Words = str | re.Pattern


def has(text: str, words: Words) -> bool:
    """Whether an error says it: a str stands in it as it is, a pattern is found."""
    return words in text if isinstance(words, str) else bool(words.search(text))


@dataclass(frozen=True)
class Kept:
    """What is to be as it was, and what is right afterwards."""

    what: Callable[[], Any]
    then: Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """A wrong program, and what is told of it."""

    name: str
    program: Callable[..., Any]
    error: type[BaseException]
    words: tuple[Words, ...]

    def check(self, **fixtures: Any) -> str:
        """Run the program with the fixtures that it names, and look at its error; the text of that."""
        named = inspect.signature(self.program).parameters
        program = partial(self.program, **{name: x for name, x in fixtures.items() if name in named})
        run, kept = program, None
        if inspect.isgeneratorfunction(self.program):
            steps = program()
            kept = next(steps)
            run = lambda: next(steps, None)  # noqa: E731
        before = clone(_tree(kept))
        with pytest.raises(self.error) as caught:
            run()
        assert_trees_equal(_tree(kept), before, f"{self.name}: changed in spite of the error")
        if isinstance(kept, Kept):
            kept.then()
        text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        missing = [words for words in self.words if not has(text, words)]
        assert not missing, f"{self.name}: not told: {missing}, in\n{text}"
        check_form(caught.value)
        return text


def check_form(error: BaseException) -> None:
    """Every error says what is wrong, why, and what to write, where a line of the package raises it.

    Not asked are errors of the system, whose text is the system's, of assertions, and the tracebacks of ranks.
    """
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or isinstance(error, OSError | AssertionError | zerofn.RankError):
        return
    file = tb.tb_frame.f_code.co_filename
    raised = linecache.getline(file, tb.tb_lineno).lstrip().startswith("raise ")
    ours = raised and PACKAGE in Path(file).parents
    assert not ours or FORM.match(str(error)), f"not in the form of wrong, why, right:\n{error}"


def check_form_of_all() -> None:
    """Have `pytest.raises` look at the form too, in all tests."""
    raises = pytest.raises

    @contextlib.contextmanager
    def in_form(*given: Any, **keywords: Any) -> Iterator[Any]:
        __tracebackhide__ = True
        with raises(*given, **keywords) as caught:
            yield caught
        check_form(caught.value)

    pytest.raises = in_form  # type: ignore[assignment]


def keeps(make: Callable[[], Any], wrong: Callable[[Any], Any]) -> Callable[[], Iterator[Any]]:
    """The program that makes what is right, and calls `wrong` with it; it is afterwards what it was."""

    def program() -> Iterator[Any]:
        made = make()
        yield made
        wrong(made)

    return program


def _tree(kept: Any) -> Any:
    made = kept.what if isinstance(kept, Kept) else kept
    return made() if callable(made) else made


class Refusals(Sequence):
    """The rows of a file, in their order."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        return pytest.param(self._rows[at], id=self._rows[at].name)

    def rows(self, error: type[BaseException], *rows: tuple[Any, ...], told: tuple[Words, ...] = ()) -> None:
        """Of (program, words, ...) each; `told` are words of all of them. A row's name is its first words."""
        for program, *words in rows:
            first = next(iter([*words, *told]))
            # Without addresses: processes that share the tests must know them by the same names.
            name = re.sub(r" at 0x[0-9a-f]+", "", first if isinstance(first, str) else first.pattern)
            self._rows.append(Row(f"{len(self._rows)}, {name[:50]}", program, error, (*told, *words)))

    def __call__(self, error: type[BaseException], *words: Words, over: Collection[Any] = ()) -> Callable[[Any], Any]:
        """The row of a function, whose name is the row's; or a row for each value of `over`, its argument."""

        def add(program: Any) -> Any:
            name = program.__name__
            if not over:
                self._rows.append(Row(name, program, error, words))
            for i, value in enumerate(over):
                told = tuple(x.format(value) if isinstance(x, str) and "{}" in x else x for x in words)
                of = value if isinstance(value, str) else str(i)
                self._rows.append(Row(f"{name}[{of}]", partial(program, value), error, told))
            return program

        return add

    def check(self) -> None:
        """All rows in their order, as one rank of a launch does."""
        for row in self._rows:
            row.check()
