"""A first state may follow from numbers of whole leaves: ranks make the steps of one process, and save for others."""

import pytest
import torch
import torch.distributed as dist
from time_limits import limit
from torch import nn

import zerofn as zf

STAGES = {"reduce_scatter": zf.reduce_scatter, "shard": zf.shard}


@zf.leafwise(init=lambda p: {"m": torch.zeros_like(p), "top": torch.tensor(p.abs().max().item())}, needs="leaf")
def scaled_by_the_start(grad, param, state):
    """An update that depends on the largest element that the leaf had."""
    m = 0.5 * state["m"] + grad
    return m * state["top"], {"m": m, "top": state["top"]}


@zf.leafwise(init=lambda p: torch.full(p.shape[:1], 1 / p.std().item()), needs="leaf")
def of_other_shapes(grad, param, state):
    """Divided by what is zero of leaves whose elements are all the same."""
    return grad * state.mean(), state


@zf.leafwise(init=lambda p: torch.zeros(int((p > 0).sum())), needs="leaf")
def of_shapes_by_numbers(grad, param, state):
    """As many numbers as the leaf has had positive elements, which its owner alone knows."""
    return grad / len(state), state + 1


# The others are of a number for each leaf, and the same at the other stage.
SOON = (("shard", "by numbers"), ("reduce_scatter", "other shapes"))
TRANSFORMS = {"of the leaf": scaled_by_the_start, "other shapes": of_other_shapes, "by numbers": of_shapes_by_numbers}


def train(stage, kind, folder, before, after):
    torch.manual_seed(0)
    # Two rows: fewer than three ranks.
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    first = [STAGES[stage]()] if dist.is_initialized() else []
    opt = zf.attach(model, zf.chain(*first, TRANSFORMS[kind](), zf.sgd(0.1)))
    if before:
        zf.load(f"{folder}/{before}", like=opt)
    # In one order on all ranks, whichever leaves each owns.
    assert list(opt.state.transforms[TRANSFORMS[kind]().name]["value"]) == list(opt.state.leaves)
    start = {path: x.clone() for path, x in zf.full_params(opt.tx, opt.state).items()}
    for step in range(3):
        model(torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3) + step).square().sum().backward()
        opt.step()
        opt.zero_grad()
    zf.save(f"{folder}/{after}", opt)
    return {path: x.clone() - start[path] for path, x in zf.full_params(opt.tx, opt.state).items()}


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        pytest.param(stage, kind, marks=() if (stage, kind) in SOON else pytest.mark.slow)
        for stage in STAGES
        for kind in TRANSFORMS
    ],
)
def test_ranks_make_the_steps_of_one_process(stage, kind, tmp_path):
    folder = str(tmp_path)
    want = train(stage, kind, folder, None, "one"), train(stage, kind, folder, "one", "on")
    assert all(x.abs().max() > 1e-3 for change in want for x in change.values())
    runs = [(2, 0, None, "two"), (2, 1, "one", "a"), (3, 1, "two", "c")]
    for ranks, part, before, after in runs:
        for found in zf.launch(train, ranks, stage, kind, folder, before, after, timeout=limit()):
            for path, change in want[part].items():
                # float64, means over ranks of equal gradients.
                torch.testing.assert_close(found[path], change, rtol=1e-12, atol=1e-14)
