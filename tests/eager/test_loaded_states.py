"""`opt.load_state` of a state that does not fit: all that is wrong is named at once, and nothing is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf


def attached(tx: Any = None, out: int = 2, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, out, dtype=dtype)
    return model, zf.attach(model, tx or zf.chain(zf.shard(), zf.adamw(0.1)))


def stepped(*args: Any, **options: Any) -> Any:
    model, opt = attached(*args, **options)
    model(torch.ones(1, 3, dtype=model.weight.dtype)).sum().backward()  # type: ignore[union-attr, arg-type]
    opt.step()
    return opt


def without(state: Any, slot: str) -> Any:
    own = {name: x for name, x in state.transforms["adamw"].items() if name != slot}
    return replace(state, transforms={**state.transforms, "adamw": own})


# By name: the state that is given, and rows of the error.
WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "another pipeline": (
        lambda: stepped(zf.chain(zf.shard(), zf.sgd(0.1, momentum=0.9))).state,
        ("adamw/exp_avg/weight: missing", "sgd/momentum/bias: unexpected"),
    ),
    "a slot is missing": (lambda: without(stepped().state, "exp_avg"), ("adamw/exp_avg/bias: missing",)),
    "another shape": (lambda: stepped(out=4).state, ("params/weight: (4, 3) torch.float32 instead of (2, 3)",)),
    "another dtype": (
        lambda: stepped(dtype=torch.float64).state,
        ("params/weight: (2, 3) torch.float64 instead of", "dtypes are never changed silently"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_all_is_named_and_nothing_is_changed(name: str):
    make, rows = WRONG[name]
    _, opt = attached()
    before = {path: x.clone() for path, x in opt.state.leaves.items()}
    with pytest.raises(ValueError, match="this is not the state of this pipeline") as error:
        opt.load_state(make())
    assert all(row in str(error.value) for row in rows), str(error.value)
    assert all(torch.equal(x, before[path]) for path, x in opt.state.leaves.items()) and int(opt.state.step) == 0


def test_what_fits_is_loaded_with_its_rates():
    given, (_, opt) = stepped(), attached()
    given.param_groups[0]["lr"] = 0.25
    opt.load_state(given.state, given.state_dict()["param_groups"])
    assert opt.param_groups[0]["lr"] == 0.25 and int(opt.state.step) == 1
    for path, x in given.state.leaves.items():
        assert torch.equal(opt.state.leaves[path], x)


def of_one_process(state: Any) -> list[str]:
    model, opt = attached()
    try:
        opt.load_state(state)
    except ValueError as error:
        return [str(error), *(str(tuple(p.shape)) for p in model.parameters())]
    return ["loaded"]


def test_shards_refuse_whole_leaves():
    """Of a leaf with one dimension both have one number of dimensions: copying would broadcast."""
    for error, *_ in zf.launch(of_one_process, 2, stepped().state, timeout=limit()):
        assert "params/bias: (2,) torch.float32 instead of (2,) torch.float32, of which this rank has (1,)" in error
        assert "zf.load(directory, like=opt)" in error
