"""A state of each row of the table of transforms that was pickled, copied or saved goes on with the bits of one that
was not. So does one of a group with a member that has no state, or no leaves."""

import copy
import io
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from transforms_table import LAYERS, ROWS, Either, row_params
from trees import flat

import zerofn as zf

GENERATOR = torch.Generator().manual_seed(2)
START = {
    "0.weight": torch.randn(6, 5, generator=GENERATOR),
    "0.bias": torch.randn(6, generator=GENERATOR),
    "2.weight": torch.randn(3, 6, generator=GENERATOR),
    "2.bias": torch.randn(3, generator=GENERATOR),
}
X = torch.randn(6, 4, 5, generator=GENERATOR)
# In the middle of a window of two, and behind updates of its own of each transform.
BEFORE = 3


def loss(params, x):
    dtype = params["0.weight"].dtype
    hidden = torch.nn.functional.linear(x.to(dtype), params["0.weight"], params["0.bias"]).tanh()
    return torch.nn.functional.linear(hidden, params["2.weight"], params["2.bias"]).float().square().mean()


def by_torch(state, tx, directory):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


def by_checkpoint(state, tx, directory):
    zf.save(directory, state)
    return zf.load(directory, like=zf.init(tx, START))


WAYS = {
    "pickle": lambda state, tx, directory: pickle.loads(pickle.dumps(state)),
    "deepcopy": lambda state, tx, directory: copy.deepcopy(state),
    "torch": by_torch,
    "checkpoint": by_checkpoint,
    "tree": lambda state, tx, directory: zf.extend.tree_map(lambda x: x.clone(), state),
    "replace": lambda state, tx, directory: replace(state, leaves={p: x.clone() for p, x in state.leaves.items()}),
}


def values(state):
    return flat({"params": state.leaves, **state.transforms, "step": state.step, "micro_step": state.micro_step})


def check_every_way(tx, tmp_path, weighted=False, ways=tuple(WAYS)):
    step = zf.make_step(loss, tx)
    state, first = zf.init(tx, START), None
    for i, x in enumerate(X):
        if i == BEFORE:
            first = state
        state, _ = step(state, x, **({"weight": 2.0 + i} if weighted else {}))
    last = values(state)
    assert first is not None
    begun = values(first)
    assert any(not torch.equal(x, begun[key]) for key, x in last.items() if key.startswith("/params"))
    for way in ways:
        state = WAYS[way](first, tx, tmp_path / "saved")
        for i in range(BEFORE, len(X)):
            state, _ = step(state, X[i], **({"weight": 2.0 + i} if weighted else {}))
        found = values(state)
        assert found.keys() == last.keys(), way
        wrong = [key for key, x in last.items() if not torch.equal(found[key], x)]
        assert not wrong, f"{way}: {wrong}"


# Each row in two of the ways, which know no transform.
@pytest.mark.parametrize("name", row_params("laws", ROWS))
def test_it_goes_on_with_the_same_bits(name, tmp_path):
    first = 2 * (list(ROWS).index(name) % 3)
    check_every_way(ROWS[name].trained(LAYERS), tmp_path, ROWS[name].weighted, tuple(WAYS)[first : first + 2])


def everywhere(path):
    return True


def nowhere(path):
    return False


MEMBERS = {
    "clip_by_value": partial(zf.clip_by_value, 0.5),
    "centralize": zf.centralize,
    "add_decayed_weights": partial(zf.add_decayed_weights, 0.1),
    "scale_by_adam": zf.scale_by_adam,
    "clip_by_global_norm": partial(zf.clip_by_global_norm, 0.1),
}


@pytest.mark.parametrize("mask", [everywhere, nowhere, LAYERS.half])
@pytest.mark.parametrize("kind", MEMBERS)
def test_a_mask_over_a_transform_without_a_state_or_without_leaves(kind, mask, tmp_path):
    check_every_way(zf.chain(zf.accumulate(2), zf.masked(MEMBERS[kind](), mask), zf.sgd(0.1)), tmp_path)


@pytest.mark.parametrize("unused", [zf.sgd(0.1), zf.adamw(0.1), zf.sgd(0.1, momentum=0.9)], ids=repr)
def test_a_label_that_no_leaf_has(unused, tmp_path):
    tx = zf.partition({"used": zf.adamw(0.1), "unused": unused, "frozen": None}, Either(LAYERS.half, "used", "frozen"))
    check_every_way(zf.chain(zf.accumulate(2), tx), tmp_path)
