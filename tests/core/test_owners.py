"""Transforms that need whole leaves, where leaves are cut over ranks: each leaf is updated at its owner.

The reference is one process on the data of all ranks, and `torch.optim.Muon`.
"""

import pytest
import rank_programs as P
import torch
from stages import STAGES, around
from time_limits import limit
from torch import nn
from torch.func import functional_call

import zerofn as zf
from zerofn.core.layout import Leaf  # inside: layouts of leaves that no model has
from zerofn.core.owners import assign_owners  # inside: who owns which leaf
from zerofn.extend import span
from zerofn.transforms import muon as module  # inside: its iteration is replaced

F64 = torch.float64


@zf.leafwise(init=lambda p: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": torch.zeros(())}, optimizer=True)
def lamb(grad, param, state, *, lr=1e-2, b1=0.9, b2=0.999):
    """You et al., 2020."""
    t = state["t"] + 1
    m = b1 * state["m"] + (1 - b1) * grad
    v = b2 * state["v"] + (1 - b2) * grad**2
    u = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-6) + 0.01 * param
    ratio = param.norm() / u.norm().clamp(min=1e-8)
    return param - lr * torch.where(ratio > 0, ratio, 1.0) * u, {"m": m, "v": v, "t": t}


def matrices(path):
    return "matrix" if path in ("0.weight", "2.weight", "4.weight") else "rest"


@zf.leafwise
def centred(grad, param):
    return grad - grad.mean()


LAST = {
    "muon": lambda: [zf.partition({"matrix": zf.muon(lr=0.02, weight_decay=0.1), "rest": zf.adamw(1e-2)}, matrices)],
    # Labels that are paths of leaves, one that no leaf has, and a chain of which a part needs whole leaves.
    "members": lambda: [
        zf.partition(
            {
                "0.weight": zf.chain(centred(), zf.adamw(1e-2)),
                "2.weight": lamb(lr=0.01),
                "nobody": zf.muon(),
                "rest": zf.masked(zf.adamw(1e-2), lambda path: path != "4.bias"),
            },
            lambda path: path if path in ("0.weight", "2.weight") else "rest",
        )
    ],
    "lamb": lambda: [lamb(lr=0.01)],
    "lamb on the host": lambda: [zf.offload(lamb(lr=0.01))],
    "gradient": lambda: [zf.clip_by_global_norm(1.0), centred(), zf.adamw(1e-2)],
    "masked": lambda: [zf.masked(centred(), lambda path: "weight" in path), zf.sgd(0.05, momentum=0.9)],
}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)).to(F64)


def batch(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=F64)


def loss_of(model, params, x):
    return functional_call(model, params, (x,)).square().mean() + functional_call(model, params, (x,)).mean()


def chain(stage, last, every):
    return zf.chain(*around(stage, zf.accumulate(every)), *LAST[last]())


def train(tx, route, data, steps):
    model = make()
    if route == "eager":
        opt = zf.attach(model, tx)
        for i in range(steps):
            x = data(i)
            (model(x).square().mean() + model(x).mean()).backward()
            opt.step()
            opt.zero_grad()
        with opt.gathered():
            return [p.detach().clone() for p in model.parameters()], opt
    state = zf.init(tx, {n: p.detach().clone() for n, p in model.named_parameters()})
    step = zf.make_step(lambda p, x: loss_of(model, p, x), tx)
    for i in range(steps):
        state, _ = step(state, data(i))
    return list(zf.full_params(tx, state).values()), state


def on_ranks(stage, steps):
    import torch.distributed as dist

    rank, found = dist.get_rank(), {}
    for last in LAST:
        for route in ("eager", "pure"):
            every = 2 if route == "eager" else 1
            found[last, route], _ = train(chain(stage, last, every), route, lambda i: batch(rank, i), steps)
    return found


@pytest.mark.parametrize(
    ("stage", "size", "steps"),
    [
        ("ZeRO-3", 2, 8),
        # Three ranks have parts that are short or empty.
        *[pytest.param(stage, size, 30, marks=pytest.mark.slow) for stage in STAGES for size in (2, 3)],
    ],
)
def test_steps_are_those_of_one_process(stage, size, steps):
    found = zf.launch(on_ranks, size, stage, steps, timeout=limit(120))
    for last in LAST:
        for route in ("eager", "pure"):
            tx = zf.chain(zf.accumulate(2 if route == "eager" else 1), *LAST[last]())
            whole, _ = train(tx, route, lambda i: torch.cat([batch(r, i) for r in range(size)]), steps)
            start = list(make().parameters())
            kept = [torch.equal(p, q) for p, q in zip(whole, start, strict=True)]
            assert all((p - q).abs().max() > 1e-3 for p, q, on in zip(whole, start, kept, strict=True) if not on)
            assert sum(kept) == (last == "members")
            for got in found:
                for x, y in zip(got[last, route], whole, strict=True):
                    # Float64. A mean over ranks is taken in another order than over a batch.
                    torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


@zf.leafwise(init=torch.zeros_like)
def by_length(grad, param, state):
    state = 0.9 * state + grad / grad.norm()
    return state, state


def named_as_entries(ranks):
    """Leaves with the names of what transforms keep: of a leafwise one `value`, of muon `momentum`."""
    found = []
    for optimizer in (zf.chain(by_length(), zf.sgd(0.1)), zf.muon(lr=0.1)):
        tx = zf.chain(*[zf.shard()] * ranks, optimizer)
        generator = torch.Generator().manual_seed(0)
        names = ("query", "key", "value", "momentum", "step")
        state = zf.init(tx, {name: torch.randn(4, 3, generator=generator, dtype=F64) for name in names})
        for i in range(3):
            state, _ = zf.update(tx, {p: x.new_full(x.shape, 1.0 + i) for p, x in state.params.items()}, state)
        found.append(zf.full_params(tx, state))
    return found


def test_leaves_may_have_the_names_of_what_transforms_keep():
    (got, _), want = zf.launch(named_as_entries, 2, 1, timeout=limit(60)), named_as_entries(0)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def counted(stage):
    """Shapes that the iteration has seen in one step; bytes of the exchanges; elements of states of this rank."""
    from zerofn.ranks.group import Traffic  # inside: counts what is sent

    seen, real, sent, count = [], module.orthogonal, [], Traffic.sent
    Traffic.sent = lambda self, op, n: sent.append(n if op == "all_to_all" else 0) or count(self, op, n)
    module.orthogonal = lambda u, *rest: seen.append(tuple(u.shape)) or real(u, *rest)
    tx = chain(stage, "muon", 1)
    _, state = train(tx, "pure", lambda i: batch(0, i), 1)
    from zerofn.core.state_entries import entries  # inside: every tensor of a state with the key of a checkpoint

    held = {(e.slot, e.path): e.value.numel() for e in entries(state) if e.slot.endswith("momentum")}
    return seen, held, sum(sent)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_matrix_is_worked_on_once_and_its_state_lives_there(size):
    for stage in (1, 2, 3):
        found = zf.launch(counted, size, stage, timeout=limit(60))
        assert sorted(shape for seen, _, _ in found for shape in seen) == [(2, 6), (6, 7), (7, 5)]
        total = {key: [held[key] for _, held, _ in found] for key in found[0][1]}
        assert sorted(map(sorted, total.values())) == sorted(sorted([n] + [0] * (size - 1)) for n in (12, 42, 35))
        # Matrices alone travel: parameters go to owners for their first states; in a step gradients and parameters go
        # there, and parameters come back, with a number from each rank to each other. Nobody sends what is its own.
        matrix = [(name, p) for name, p in make().named_parameters() if matrices(name) == "matrix"]
        leaves = [Leaf(name, p.shape, p.dtype, "cpu") for name, p in matrix]
        others = sum(x.numel - len(range(x.numel)[slice(*span(x.shape, r, size))]) for x, r in owned(leaves, size))
        assert sum(sent for _, _, sent in found) == 4 * 8 * others + 8 * size * (size - 1)


def owned(leaves, size):
    ranks = assign_owners(leaves, size)
    return [(leaf, ranks[leaf.path]) for leaf in leaves]


def saved(directory, last, stage):

    rank = P.rank_and_size()[0]
    tx = chain(stage, last, 1)
    _, state = train(tx, "pure", lambda i: batch(rank, i), 3)
    zf.save(directory, state)
    return list(zf.full_params(tx, state).values())


def loaded(directory, last, stage):
    tx, model = chain(stage, last, 1), make()
    state = zf.load(directory, like=zf.init(tx, {n: p.detach().clone() for n, p in model.named_parameters()}))
    before = [p.clone() for p in zf.full_params(tx, state).values()]
    step = zf.make_step(lambda p, x: loss_of(model, p, x), tx)
    # The same data on all ranks, so that their number does not matter.
    for i in range(3):
        state, _ = step(state, batch(9, i))
    return before, list(zf.full_params(tx, state).values())


@pytest.mark.parametrize("last", ["muon", *[pytest.param(x, marks=pytest.mark.slow) for x in ("members", "lamb")]])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(last, tmp_path):
    directory = str(tmp_path / "saved")
    was = zf.launch(saved, 3, directory, last, 3, timeout=limit(60))[0]
    found = [zf.launch(loaded, 2, directory, last, 3, timeout=limit(60))[1], loaded(directory, last, 0)]
    found.append(zf.launch(loaded, 3, directory, last, 2, timeout=limit(60))[2])
    for before, after in found:
        for x, y in zip(before, was, strict=True):
            assert torch.equal(x, y)
        for x, y in zip(after, found[1][1], strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
        assert sum((x - p).abs().max() <= 1e-4 for x, p in zip(after, was, strict=True)) == (last == "members")


OPTIONS = [
    {"nesterov": True},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (3.0, -3.2, 1.2)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: next(iter(x.values())))
def test_muon_is_that_of_torch(options, monkeypatch):
    # torch's iteration is in bf16, where the order of two roundings shows in the first digits.
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *a, **k: x.clone() if torch.bfloat16 in k.values() else to(x, *a, **k)
    )
    torch.manual_seed(0)
    start = {"a": torch.randn(8, 5, dtype=F64), "b": torch.randn(3, 9, dtype=F64)}
    start |= {f"expert {i}": torch.randn(5, 3, dtype=F64) for i in range(2)}
    theirs = {k: x.clone().requires_grad_() for k, x in start.items()}
    opt = torch.optim.Muon(theirs.values(), lr=0.05, weight_decay=0.1, momentum=0.9, **options)
    tx = zf.muon(lr=0.05, weight_decay=0.1, momentum=0.9, **options)

    def stacked(tree):
        return {"a": tree["a"], "b": tree["b"], "experts": torch.stack([tree["expert 0"], tree["expert 1"]])}

    state = zf.init(tx, stacked(start))
    for _ in range(5):
        grads = {k: torch.randn_like(x) for k, x in start.items()}
        for k, p in theirs.items():
            p.grad = grads[k].clone()
        opt.step()
        state, _ = zf.update(tx, stacked(grads), state)
    for k, p in stacked({k: p.detach() for k, p in theirs.items()}).items():
        assert (p - stacked(start)[k]).abs().max() > 0.05
        # Float64; products are added up in another order.
        torch.testing.assert_close(state.params[k], p, rtol=0, atol=1e-12)


def vector_under_shard():
    # A ValueError at the owner of the bias, and on the other rank what that has said.
    with pytest.raises((ValueError, RuntimeError), match=r"muon is for matrices\n +bias: of shape \(3,\)"):
        zf.attach(torch.nn.Linear(4, 3), zf.chain(zf.shard(), zf.muon()))
    return True


def test_every_rank_is_told_of_what_is_no_matrix():
    assert all(zf.launch(vector_under_shard, 2, timeout=limit()))


def refused(last):
    try:
        zf.attach(make(), chain(3, last, 1), in_backward=True)
    except ValueError as e:
        return str(e)


@pytest.mark.parametrize("last, who", [("muon", "partition(muon)"), ("members", "partition(centred)")])
def test_no_update_in_backward_of_a_member_that_needs_whole_leaves(last, who):
    for told in zf.launch(refused, 2, last, timeout=limit(60)):
        assert f"{who}, ...), in_backward=True" in told and "needs whole leaves, which travel to their owners" in told
