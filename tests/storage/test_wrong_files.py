"""Files and states that cannot be saved or read: each is named, and nothing is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Kept, Refusals
from torch import nn

import zerofn as zf
from zerofn.storage import files  # inside: its locks are held
from zerofn.testing import assert_trees_equal

WRONG = Refusals()
ADAMW = zf.adamw(1e-2)


def state_of(tx: zf.Transform = ADAMW, **params: torch.Tensor) -> Any:
    return zf.init(tx, params or {"w": torch.ones(3), "b": torch.zeros(2, 2)})


def saved(directory: Path) -> Any:
    state, _ = zf.update(ADAMW, {"w": torch.ones(3), "b": torch.ones(2, 2)}, state_of())
    zf.save(directory, state)
    return state


# ---- damaged files ----

SHARES: dict[str, Callable[[int], int]] = {
    "none": lambda n: 0,
    "one": lambda n: 1,
    "half": lambda n: n // 2,
    # The table ends in a line break, without which it is whole.
    "nearly all": lambda n: n - 2,
}


@WRONG(ValueError, "is damaged", "nothing was loaded", over=SHARES)
def a_data_file_that_was_cut_short(share: str, tmp_path: Path) -> Iterator[Any]:
    state = saved(tmp_path)
    (data,) = tmp_path.glob("**/*.distcp")
    whole = data.read_bytes()
    size = SHARES[share](len(whole))
    data.write_bytes(whole[:size])
    yield state
    try:
        zf.load(tmp_path, like=state)
    except ValueError as error:
        assert f"it ends after {size} bytes" in str(error)
        raise


@WRONG(ValueError, "zerofn.json is damaged", over=SHARES)
def a_table_that_was_cut_short(share: str, tmp_path: Path) -> Iterator[Any]:
    state = saved(tmp_path)
    table = tmp_path / "zerofn.json"
    whole = table.read_bytes()
    table.write_bytes(whole[: SHARES[share](len(whole))])
    yield state
    zf.load(tmp_path, like=state)


def locked(directory: Path, exclusive: bool) -> Any:
    lock = files.Lock()
    lock.acquire(directory, exclusive)
    return lock


USES: dict[str, Callable[[Path, Any], Any]] = {
    "save": lambda directory, state: zf.save(directory, state),
    "load": lambda directory, state: zf.load(directory, like=state),
}


@WRONG(TimeoutError, "in use by another save or load", over=USES)
def a_directory_in_use(use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    state = saved(tmp_path)
    lock = locked(tmp_path, exclusive=True)
    monkeypatch.setattr(files, "PATIENCE", 0.1)

    def afterwards() -> None:
        lock.release()
        reading = locked(tmp_path, exclusive=False)
        assert_trees_equal(zf.load(tmp_path, like=state).params, state.params)
        reading.release()
        zf.save(tmp_path, state)

    yield Kept(lambda: state, afterwards)
    USES[use](tmp_path, state)


@WRONG(ValueError, "it is missing")
def a_file_that_is_missing(tmp_path: Path) -> Iterator[Any]:
    state = saved(tmp_path)
    (data,) = tmp_path.glob("**/*.distcp")
    data.unlink()
    yield state
    zf.load(tmp_path, like=state)


@WRONG(ValueError, "format version 4", "reads versions 1 to 3", "zerofn==9.1")
def another_format_version(tmp_path: Path) -> Iterator[Any]:
    state = saved(tmp_path)
    table = tmp_path / "zerofn.json"
    table.write_text(json.dumps({**json.loads(table.read_text()), "version": 4, "zerofn": "9.1"}))
    yield state
    zf.load(tmp_path, like=state)


@WRONG(ValueError, "none of the parameters\n", re.compile(r"why: *params/v: missing"))
def no_leaf_of_the_file(tmp_path: Path) -> Iterator[Any]:
    saved(tmp_path)
    other = state_of(v=torch.ones(3))
    yield other
    zf.load(tmp_path, other, strict=False, tx=ADAMW)


WRONG.rows(
    TypeError,
    (lambda tmp_path: zf.load(tmp_path, saved(tmp_path), strict=False), "a state does not have its pipeline"),
    (lambda tmp_path: zf.load(tmp_path, saved(tmp_path), tx=ADAMW), "tx is used only with"),  # type: ignore[call-overload]
)


def into(write: Callable[[Path], object], directory: Path) -> Iterator[Any]:
    """`write`, which leaves the directory as it was."""
    yield lambda: torch.tensor(len(list(directory.iterdir())))
    write(directory)


WRONG.rows(
    TypeError,
    (lambda tmp_path: zf.load(tmp_path, like=nn.Linear(1, 1)), "zf.load(directory, like=Linear)"),  # type: ignore[call-overload]
    (lambda tmp_path: zf.load_safetensors(tmp_path, like=state_of()), "a state does not have its pipeline"),
)
WRONG.rows(
    FileNotFoundError,
    (lambda tmp_path: zf.load(tmp_path / "no", state_of()), "there is no such directory"),
    (lambda tmp_path: zf.load(tmp_path, state_of()), re.compile(r"no checkpoint in [\s\S]*it has no zerofn.json")),
    (lambda tmp_path: zf.load_safetensors(tmp_path, like=state_of(), tx=ADAMW), "give the .json"),
)


@WRONG(FileNotFoundError, "that is a file")
def a_file_instead_of_a_directory(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "file").write_text("x")
    yield
    zf.load(tmp_path / "file", state_of())


@WRONG(FileNotFoundError, "zf.save did not write")
def what_somebody_else_has_written(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / ".metadata").write_text("x")
    yield
    zf.load(tmp_path, state_of())


@WRONG(OSError, "could not be read")
def a_file_that_is_no_safetensors(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "broken").write_bytes(b"\0" * 20)
    yield
    zf.load_safetensors(tmp_path / "broken", like=state_of(), tx=ADAMW)


@WRONG(OSError, re.compile(r"could not write[\s\S]*as it was"))
def a_directory_in_the_place_of_a_file(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "file").write_text("x")
    yield from into(lambda directory: zf.save(directory / "file", state_of()), tmp_path)


# ---- what has no place in a file, or in a table ----

NO_PLACE: dict[str, Callable[[], Any]] = {
    "zf.save(directory, dict)": lambda: {"w": 1},
    "params/w: is on the meta device": lambda: state_of(w=torch.ones(1, device="meta")),
    "params/step: two entries have this name": lambda: state_of(
        zf.sgd(0.1).named("params"), w=torch.ones(1), step=torch.ones(1)
    ),
}


@WRONG(TypeError, "{}", over=NO_PLACE)
def what_cannot_be_saved(told: str, tmp_path: Path) -> Iterator[Any]:
    yield from into(lambda directory: zf.save(directory, NO_PLACE[told]()), tmp_path)


ONE = {"w": torch.ones(1)}
WRONG.rows(
    TypeError,
    (lambda: zf.describe(nn.Linear(1, 1)), "describe(Linear)", "zf.describe(opt)"),  # type: ignore[arg-type]
    (lambda: zf.plan(ADAMW, {"n": torch.ones(1, dtype=torch.int64)}), "n: torch.int64"),
)
WRONG.rows(
    ValueError,
    *[
        (lambda given=given: zf.plan(ADAMW, ONE, **given), f"plan({next(iter(given))}=")
        for given in ({"world_size": 0}, {"world_size": 2.0}, {"world_size": True}, {"rank": 1}, {"rank": -1})
    ],
    (lambda: zf.plan(zf.chain(zf.clip_by_value(1.0)), ONE), "no optimizer"),
)


@WRONG(TypeError, "mine/graph/w: is of layout torch.sparse_coo; keep x.to_dense()")
def a_sparse_state(tmp_path: Path) -> Iterator[Any]:
    def init(leaves: Any, layout: Any) -> Any:
        return {"graph": {path: torch.eye(2).to_sparse() for path in leaves}}

    state = state_of(zf.chain(zf.extend.Transform("mine", init_fn=init), zf.sgd(0.1)), w=torch.ones(2))
    yield
    zf.save(tmp_path, state)


@WRONG(ValueError, "buffers/0.wide: its elements share memory")
def an_expanded_buffer_that_differs(tmp_path: Path) -> Iterator[Any]:
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    for model, value in zip(models, (1.0, 2.0), strict=True):
        model[0].register_buffer("wide", torch.tensor([value]).expand(3))
    first, again = (zf.attach(model, ADAMW) for model in models)
    zf.save(tmp_path, first)
    yield lambda: {k: v.clone() for k, v in models[1].state_dict().items()}
    zf.load(tmp_path, like=again)


# ---- saves of a run ----


def of_checkpoints(call: Callable[[Any], Any], **options: Any) -> Callable[[Path], Any]:
    return lambda tmp_path: call(zf.Checkpoints(tmp_path, **options))


def scored(saves: Any, *scores: Any) -> None:
    for score in scores:
        saves.save(state_of(), score=score)


WRONG.rows(
    ValueError,
    (of_checkpoints(scored, last=0), "last is a number of checkpoints"),
    (of_checkpoints(scored, best=-1), "best is a number of checkpoints"),
    (of_checkpoints(scored, largest=1), "largest is"),
    (lambda tmp_path: zf.save(tmp_path, state_of(), wait=0), "wait"),
)
WRONG.rows(
    TypeError,
    (of_checkpoints(lambda saves: scored(saves, "good")), "checkpoints are put in order by a number"),
    (of_checkpoints(lambda saves: saves.save({})), "it is not a state"),
)


@pytest.mark.parametrize("row", WRONG)
def test_refused(row, tmp_path, monkeypatch):
    row.check(tmp_path=tmp_path, monkeypatch=monkeypatch)
