"""A compiled step that writes into its state, and whose graph breaks inside of an update, gives the same numbers."""

import pytest
import torch

import zerofn as zf


@zf.leafwise(init=torch.zeros_like, needs="element")
def momentum(grad, param, state):
    """Its graph breaks, as at a `print`."""
    torch._dynamo.graph_break()
    state = 0.5 * state + grad
    return state, state


FIRST = {"accumulate": lambda: zf.accumulate(2), "scale_loss": lambda: zf.scale_loss()}
LAST = {"sgd": lambda: zf.sgd(1.0), "adamw": lambda: zf.adamw(0.1)}


def run(first, last, compiled):
    """Numbers of parameters and states after each of two steps, of which one is held; and whether it was made."""
    tx = zf.chain(FIRST[first](), momentum(), LAST[last]())
    step = zf.make_step(lambda p, x: sum((v * x).sum() for v in p.values()), tx, donate=True)
    step = torch.compile(step, backend="aot_eager") if compiled else step
    state, found = zf.init(tx, {"w": torch.zeros(2)}), []
    for i in range(2):
        x = float("inf") if first == "scale_loss" and i == 1 else 1.0
        state, metrics = step(state, torch.tensor(x))
        params = [p.tolist() for p in state.params.values()]
        kept = [x.flatten().tolist() for x in torch.utils._pytree.tree_leaves(state.transforms)]
        found.append((params, kept, bool(metrics["updated"])))
    return found


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("scale_loss", "sgd"),
        pytest.param("accumulate", "adamw", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_held_writes_nothing(first, last):
    want = run(first, last, False)
    assert {made for *_, made in want} == {False, True} and (first == "accumulate" or want[1][0] == want[0][0])
    for (got, states, made), (right, wanted, as_well) in zip(run(first, last, True), want, strict=True):
        assert made == as_well
        for x, y in zip([*got, *states], [*right, *wanted], strict=True):
            # Adam's formula in a graph, and the kernel without one: the last bit.
            assert x == pytest.approx(y, rel=0 if last == "sgd" else 1e-6)
