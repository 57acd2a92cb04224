"""What `zf.launch` is not to be given, and where it may not be called: refused by name, with what to write."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from refusals import Refusals
from time_limits import limit

import zerofn as zf
import zerofn.ranks.process_groups as groups  # inside: what is read from the environment

WRONG = Refusals()


def rank() -> int:
    return int(os.environ["RANK"])


def nested() -> None:
    zf.launch(rank, 2, timeout=limit())


GIVEN: list[tuple[type[Exception], dict[str, Any]]] = [
    (ValueError, {"timeout": float("nan")}),
    (TypeError, {"timeout": "3"}),
    (TypeError, {"timeout": True}),
    (ValueError, {"timeout": 0}),
    (ValueError, {"threads": 0}),
    (TypeError, {"threads": "1"}),
    (TypeError, {"threads": 1.5}),
    (TypeError, {"backend": 3}),
    (TypeError, {"init": "no"}),
]
for _error, _given in GIVEN:
    _words = (f"zf.launch(fn, nproc, {next(iter(_given))}=", "why:", "write:")
    WRONG.rows(_error, (lambda given=_given: zf.launch(rank, 2, **given), *_words))
WRONG.rows(
    TypeError,
    (lambda: zf.launch(3, 2), "not launch(train(config), 2)"),  # type: ignore[arg-type]
    *((lambda it=it: zf.launch(rank, it), "number of ranks") for it in (2.0, True, "2")),
)
WRONG.rows(
    ValueError,
    *((lambda it=it: zf.launch(rank, it), f"nproc={it})", "at least one") for it in (0, -1)),
    (lambda: zf.launch(rank, 2, timeout=0), "greater than zero"),
)
WRONG.rows(
    zf.RankError,
    (lambda: zf.launch(nested, 1, timeout=limit()), "RuntimeError: launch inside rank 0 of a job"),
)


@WRONG(ValueError, "zerofn[notebooks]")
def a_closure_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    yield
    zf.launch(lambda: 0, 2, timeout=limit())


@WRONG(ValueError, "cannot be sent to another process")
def a_closure_over_a_lock() -> Iterator[None]:
    lock = threading.Lock()
    yield
    zf.launch(lambda: lock, 2, timeout=limit())


@WRONG(RuntimeError, "inside rank 1")
def a_launch_in_a_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    yield
    zf.launch(rank, 2)


@WRONG(RuntimeError, "a script, which each rank runs again", 'if __name__ == "__main__": zf.launch(fn, 2)')
def a_script_without_a_guard_and_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setenv("ZEROFN_RANK", "1")
    yield
    zf.launch(rank, 2)


@WRONG(ValueError, "no number of seconds", over=["soon", "-1", "0", "nan"])
def a_limit_that_is_none(given: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ZEROFN_TOGETHER_TIMEOUT", given)
    yield
    groups.limit()


@pytest.mark.parametrize("row", WRONG)
def test_refused(row, monkeypatch):
    row.check(monkeypatch=monkeypatch)
