"""What the library reads by name of the state of a transform of one's own: averages, windows, skipped steps."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zerofn as zf
from zerofn.extend import AVERAGE, COUNT, SKIPPED_STEPS, Facts, Prepared, Transform, counter, transform


@transform
def midpoint() -> Transform:
    """Half the way from the old average to the new parameters."""

    def init(leaves, layout):
        return {AVERAGE: {path: x.clone() for path, x in leaves.items()}}

    def update(new, state, params, carry, ctx):
        return new, {AVERAGE: {path: (old + new[path]) / 2 for path, old in state[AVERAGE].items()}}

    return Transform("midpoint", needs="element", facts=Facts(watches=True), init_fn=init, update_fn=update)


@transform
def first_of_two(counted_in: str) -> Transform:
    """Every second gradient goes on; the others are left out."""

    def init(leaves, layout):
        return {counted_in: counter(), SKIPPED_STEPS: counter()}

    def prepare(state, grads, params, ctx):
        now = (int(state[counted_in]) + 1) % 2
        skipped = state[SKIPPED_STEPS] + now
        return Prepared(state={counted_in: counter(now), SKIPPED_STEPS: skipped}, emit=now == 0)

    return Transform(
        "first_of_two", needs="element", facts=Facts(window=2), init_fn=init, prepare_fn=prepare, update_fn=_as_it_is
    )


def _as_it_is(grads, state, params, carry, ctx):
    return grads, state


def one_weight() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 1)).sum().backward()


def test_an_average_of_ones_own_is_read_exported_and_computed_with(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = one_weight()
    opt = zf.attach(model, zf.chain(zf.sgd(1.0), midpoint()))
    backward(model)
    opt.step()
    assert model.weight.item() == -1.0
    assert zf.full_params(opt.tx, opt.state, of="midpoint")["weight"].item() == -0.5
    with opt.averaged():
        assert model(torch.ones(1, 1)).item() == -0.5
    zf.export_safetensors(tmp_path / "average.safetensors", opt, of="midpoint")
    assert load_file(tmp_path / "average.safetensors")["weight"].item() == -0.5


def test_a_window_of_ones_own_says_when_it_closes_and_what_it_left_out() -> None:
    model = one_weight()
    opt = zf.attach(model, zf.chain(first_of_two(COUNT), zf.sgd(1.0)))
    seen = []
    for _ in range(3):
        backward(model)
        seen.append((opt.is_boundary, model.weight.item(), opt.skipped_steps))
        opt.step()
        opt.zero_grad()
    assert seen == [(False, 0.0, 0), (True, 0.0, 1), (False, -1.0, 1)]


def test_a_window_that_counts_elsewhere_is_told_where_to_count() -> None:
    opt = zf.attach(one_weight(), zf.chain(first_of_two("seen"), zf.sgd(1.0)))
    with pytest.raises(ValueError) as told:
        _ = opt.is_boundary
    assert "first_of_two" in str(told.value) and "zerofn.extend.COUNT" in str(told.value)
