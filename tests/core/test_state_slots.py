"""What lies along a leaf is asked of `init`: leaf by leaf, and without memory for the lengths that it is asked of."""

import torch
from time_limits import limit
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerofn as zf
from zerofn.extend import Transform


def of_one_kind(leaves, _):
    """Momentum for one leaf, and six numbers for another of the same shape, dtype and last name."""
    return {"value": {p: torch.zeros_like(x) if p.startswith("a") else torch.zeros(6) for p, x in leaves.items()}}


def counted_by_kind():
    def update(grads, state, params, carry, ctx):
        new = {p: x + (grads[p] if p.startswith("a") else grads[p].sum()) for p, x in state["value"].items()}
        return grads, {"value": new}

    return Transform("kinds", needs="element", init_fn=of_one_kind, update_fn=update)


def forms_of_kinds():
    model = nn.ModuleDict({name: nn.Linear(3, 4, bias=False) for name in "ab"})
    opt = zf.attach(model, zf.chain(zf.shard(), counted_by_kind(), zf.sgd(0.1)))
    forms = {(x.form, x.paths) for x in opt.state.layout.placement.slots if x.owner == "kinds"}  # inside
    sum(m(torch.ones(1, 3)).sum() for m in model.values()).backward()
    opt.step()
    return forms


def test_leaves_of_one_kind_may_have_states_of_their_own():
    for forms in zf.launch(forms_of_kinds, 2, timeout=limit()):
        assert forms == {("along", ("a.weight",)), ("fixed", ("b.weight",))}


@zf.leafwise(init=lambda p: torch.ones(p.shape), needs="row")
def rows_made_by_shape(grad, param, state):
    return grad, state + grad


def test_init_is_asked_without_memory():
    """A thousand times as many rows as there are would be gigabytes of this leaf."""
    forms = zf.launch(wide, 2, timeout=limit())
    assert forms == [["along"], ["along"]]


def wide():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "cpu":
                self.elements = max(self.elements, out.numel())
            return out

    model = nn.Linear(4096, 8, bias=False)
    with Largest() as seen:
        opt = zf.attach(model, zf.chain(zf.shard(), rows_made_by_shape(), zf.sgd(0.1)))
    assert 4 * 4096 <= seen.elements <= 11 * 4096
    return [x.form for x in opt.state.layout.placement.slots if x.owner == "rows_made_by_shape"]
