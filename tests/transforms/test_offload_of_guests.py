"""A transformation of another library kept on the host: its state may have words and `None` in it."""

import torch

import zerofn as zf


class Counting:
    """A transformation of another library, whose state is not of tensors alone."""

    def init(self, params):
        return {
            "nothing": None,
            "name": "sums",
            "count": torch.tensor(0),
            "sum": {path: torch.zeros_like(x) for path, x in params.items()},
        }

    def update(self, updates, state, params=None):
        summed = {path: state["sum"][path] + g for path, g in updates.items()}
        state = {**state, "count": state["count"] + 1, "sum": summed}
        return {path: -0.5 * g for path, g in updates.items()}, state


def test_a_state_with_words_and_none_is_kept_on_the_host():
    tx = zf.chain(zf.offload(Counting()))
    step, state = zf.make_step(lambda p: p["w"].sum(), tx), zf.init(tx, {"w": torch.ones(3)})
    for _ in range(2):
        state, _ = step(state)
    inner = state.transforms["Counting"]["inner"]
    assert torch.equal(state.params["w"], torch.zeros(3)) and torch.equal(inner["sum"]["w"], torch.full((3,), 2.0))
    assert inner["count"] == 2 and inner.keys() == {"count", "sum"}
