"""Under vmap alone kernels run on the leaves of all members: a batch of steps is a loop, to the bit."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import zerofn as zf
from zerofn.kernels import lists  # inside: from which size on programs run

RATES = torch.tensor([0.1, 0.2, 0.3, 0.4])
BF16 = torch.bfloat16
MAKERS = {
    "adamw": lambda lr: zf.adamw(lr, weight_decay=0.1),
    "skips": lambda lr: zf.chain(zf.skip_nonfinite(), zf.adam(lr), zf.ema(0.9)),
    "sgd": lambda lr: zf.sgd(lr, momentum=0.9, nesterov=True),
    "bf16": lambda lr: zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(lr)),
    "kahan": lambda lr: zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(lr, rounding="kahan")),
    "NAdam": lambda lr: zf.from_torch(torch.optim.NAdam, lr=lr),
}


# Formulas without a kernel by hand: from a size on a program runs on the leaves of all members.
FORMULAS = ("skips", "sgd", "bf16", "kahan")


@pytest.fixture(params=[False, True], ids=["small", "large"])
def large(request, monkeypatch):
    """Whether leaves count as large."""
    if request.param:
        monkeypatch.setattr(lists, "LARGE", 1)
    return request.param


def draws(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def loss(p, x):
    """Element by element: a batch of matrix products is another kernel, and on some processors has other bits."""
    w, b = p["w"].float(), p["b"].float()
    for row in x.unbind(-2):
        seen = sum(number * weights for number, weights in zip(row.unbind(-1), w.unbind(-2), strict=True))
        b = b + seen * seen.abs() / 4
    return b.square().sum() + (p["w"] ** 2).sum()


def states(tx, members):
    return [zf.init(tx, {"w": w, "b": b}) for w, b in zip(draws(members, 3, 2), draws(members, 2), strict=True)]


def stack(trees):
    return tree_map(lambda *xs: torch.stack(xs), *trees)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shared", ["batches", "states", "neither"])
def test_a_batch_of_steps_is_a_loop(name, shared, large):
    tx = MAKERS[name](0.1)
    step = zf.make_step(loss, tx)
    each = states(tx, 4)
    if shared == "states":
        each = each[:1] * 4
    xs = draws(3, 4, 5, 3)
    xs[1, 2] *= torch.inf if name == "skips" else 1
    if shared == "batches":
        xs = xs[:, 1:2].expand(-1, 4, -1, -1)
    together = each[0] if shared == "states" else stack(each)
    for i, x in enumerate(xs):
        one = shared == "states" and i == 0
        given = (together, x[0]) if shared == "batches" else (together, x)
        together, _ = torch.vmap(step, (None if one else 0, None if shared == "batches" else 0))(*given)
        each = [step(state, own)[0] for state, own in zip(each, x, strict=True)]
    for ours, theirs in zip(tree_leaves(together), tree_leaves(stack(each)), strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("name", ["adamw", "bf16", "kahan", "sgd"])
def test_each_member_has_its_rate(name, large):
    x, params = draws(5, 3), {"w": draws(3, 2), "b": draws(2)}

    def run(rate):
        tx = MAKERS[name](rate)
        state = zf.init(tx, params)
        for _ in range(3):
            state, _ = zf.make_step(loss, tx)(state, x)
        return state.leaves

    together, each = torch.vmap(run)(RATES), stack([run(rate) for rate in RATES])
    assert all(together[p].equal(each[p]) and not each[p][0].equal(each[p][1]) for p in each)


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_members_whose_gradient_is_short_are_not_clipped(limit):
    """Norms are summed in another order in a batch: in fp32 to a few units in the last place."""
    tx = zf.chain(zf.clip_by_global_norm(limit), zf.sgd(0.1))
    step, each, x = (
        zf.make_step(loss, tx),
        states(tx, 4),
        draws(4, 5, 3) * torch.tensor([0.0, 1.0, 2.0, 9.0])[:, None, None],
    )
    together, shown = torch.vmap(step)(stack(each), x)
    alone = [step(state, own) for state, own in zip(each, x, strict=True)]
    torch.testing.assert_close(shown["grad_norm"], stack([m["grad_norm"] for _, m in alone]))
    for p, new in together.leaves.items():
        torch.testing.assert_close(new, stack([s.leaves[p] for s, _ in alone]), rtol=0, atol=0 if limit > 1 else 1e-9)


def test_what_autograd_follows_goes_through_the_formula():
    tx = zf.adamw(0.1)
    params = {"w": draws(4, 3, 2).requires_grad_(), "b": draws(4, 2)}
    state = torch.vmap(lambda p: zf.init(tx, p, create_graph=True))(params)
    new, _ = torch.vmap(zf.make_step(loss, tx, create_graph=True), (0, None))(state, draws(5, 3))
    (found,) = torch.autograd.grad(new.leaves["w"].square().sum(), params["w"])
    once = lambda w, b: zf.make_step(loss, tx)(zf.init(tx, {"w": w, "b": b}), draws(5, 3))[0].leaves["w"]  # noqa: E731
    want = [
        torch.func.grad(lambda w, b=b: once(w, b).square().sum())(w.detach())
        for w, b in zip(*params.values(), strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(want))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dense", [True, False])
def test_a_donated_batch_of_states_is_written_where_it_lies(name, dense, large):
    """Unless members skip a step, or lie between one another: there a kernel would walk over its neighbours."""
    tx = MAKERS[name](0.1)
    made = stack(states(tx, 4))
    if not dense:
        made = tree_map(lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0), made)
    kept, given = made, tree_map(torch.clone, made)
    plain, step = (torch.vmap(zf.make_step(loss, tx, donate=d)) for d in (False, True))
    xs = draws(3, 4, 5, 3)
    xs[1, 2] *= torch.inf if name == "skips" else 1
    for i, x in enumerate(xs):
        before, old = [t.data_ptr() for t in given.leaves.values()], given
        kept, shown = plain(kept, x)
        given, told = step(given, x)
        for ours, theirs in zip(tree_leaves((given, told)), tree_leaves((kept, shown)), strict=True):
            assert ours.equal(theirs) or not theirs.isfinite().all()
        # What was made anew in the first step is dense from then on.
        # Small leaves of a formula have new memory in a batch.
        written = name != "skips" and (large or name not in FORMULAS) and (dense or i > 0)
        assert ([t.data_ptr() for t in given.leaves.values()] == before) == written
        with pytest.raises(RuntimeError, match=r"(?s)a step of a state that was donated.*write: state, metrics = step"):
            step(old, x)


def test_what_a_donated_batch_shows_is_from_before_its_update():
    tx = zf.sgd(0.5)
    step = zf.make_step(lambda p: ((p["w"] ** 2).sum(), {"w": p["w"], "row": p["w"][:1]}), tx, donate=True)
    before = {"w": draws(4, 3)}
    state, shown = torch.vmap(step)(stack([zf.init(tx, {"w": w}) for w in before["w"]]))
    shown = shown["aux"]
    assert shown["w"].equal(before["w"]) and shown["row"].equal(before["w"][:, :1])
    assert state.leaves["w"].equal(torch.zeros(4, 3))
