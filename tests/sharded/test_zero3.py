"""What sharded stages promise, counted: full parameters alive, forwards, bytes sent, gradients kept."""

import functools
import gc
import time

import pytest
import rank_programs as P
import torch
import torch.distributed as dist
from gone_gradients import is_gone
from stages import around
from time_limits import limit
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from units_alive import UnitsAlive

import zerofn as zf
import zerofn.eager.resident_params  # inside: what is asked at attach is left out, or counted
import zerofn.sharded.reducer  # inside: its patience and its buckets are made small

WIDTH, LAYERS = 64, 6


class Wide(nn.Module):
    """Blocks of one known size, large beside everything else."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.kind = kind
        self.calls = 0
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(LAYERS)])

    def forward(self, x):
        for block in self.blocks:
            if self.kind == "plain":
                x = torch.tanh(self.count(block, x))
            else:
                x = torch.tanh(checkpoint(self.count, block, x, use_reentrant=self.kind == "reentrant"))
        return x

    def count(self, block, x):
        self.calls += 1
        return block(x)


def full_weights():
    """How many distinct storages as large as a block's full weight are alive now."""
    for _ in range(20):
        found = set()
        for o in gc.get_objects():
            if not isinstance(o, torch.Tensor) or isinstance(o, DTensor):
                continue
            if o.untyped_storage().nbytes() == WIDTH * WIDTH * 8:
                found.add(o.untyped_storage().data_ptr())
        if len(found) <= 2:
            break
        # The backend's thread lets go of a buffer a moment after the work is done.
        time.sleep(0.01)
    return len(found)


def count_alive(kind):
    """The most full-sized tensors at any hook of forward and of backward: parameters, and one gradient on its way."""
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = Wide(kind)
    alive = UnitsAlive(zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1))))
    gc.disable()
    seen = {"forward": 0, "backward": 0}
    for block in model.blocks:

        def note(m, a, o):
            seen["forward"] = max(seen["forward"], full_weights())
            if o.requires_grad:
                o.register_hook(lambda g: seen.__setitem__("backward", max(seen["backward"], full_weights())))

        block.register_forward_hook(note)
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    loss = model(x).square().sum()
    after = full_weights()
    loss.backward()
    left = full_weights()
    gc.enable()
    assert all(p.grad.as_subclass(torch.Tensor).abs().max() > 0 for p in model.parameters())
    return seen, after, left, model.calls, alive.most


@pytest.mark.parametrize("kind, calls", [("plain", LAYERS), ("saved", 2 * LAYERS), ("reentrant", 2 * LAYERS)])
def test_two_blocks_are_alive_at_most_and_nothing_is_computed_twice(kind, calls):
    for seen, after, left, called, most in zf.launch(count_alive, 2, kind, timeout=limit()):
        # In backward a weight's gradient, as large as the weight, may still stand beside the two.
        assert seen["forward"] <= 2 and 1 <= seen["backward"] <= 3, seen
        assert most <= 2
        assert after <= 2 and left <= 2
        assert called == calls


def traffic(order):
    """Bytes and calls of one training step after the first, by collective."""
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = Wide()
    opt = zf.attach(model, zf.chain(*around(order), zf.sgd(0.1)))
    groups = {id(g): g for g in (*opt._own.home.channels.groups, *opt._own.home.pipe.groups)}
    for step in range(2):
        for g in groups.values():
            g.traffic.reset()
        x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        # Without this the first weight would not be needed in backward.
        model(x.requires_grad_()).square().sum().backward()
        opt.step()
        opt.zero_grad()
    total = {}
    for g in groups.values():
        for op, n in g.traffic.by_op.items():
            total[op] = total.get(op, 0) + n
    return total


def messages_of_a_step():
    """By channel, the collectives of one `opt.step()`."""
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = Wide()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    for step in range(2):
        x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().sum().backward()
        channels = opt._own.home.channels
        for group in (channels.control, channels.wanted):
            group.traffic.reset()
        opt.step()
        opt.zero_grad()
    return channels.control.traffic.calls_by_op, channels.wanted.traffic.calls_by_op


def test_a_step_is_agreed_on_where_ranks_rest():
    for control, wanted in zf.launch(messages_of_a_step, 2, timeout=limit()):
        assert control == {} and wanted == {"all_gather": 1}, (control, wanted)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_sent_are_those_of_the_formula(size):
    one = WIDTH * WIDTH * 8 * (size - 1) // size
    want = {
        "data parallel": {"all_reduce": 2 * LAYERS},
        "ZeRO-2": {"reduce_scatter": LAYERS, "all_gather": LAYERS},
        # The two blocks that forward used last are still there when backward begins.
        "ZeRO-3": {"all_gather": 2 * LAYERS - 2, "reduce_scatter": LAYERS},
    }
    # A flag for each leaf and rank travels with gradients, and a few scalars of norms.
    spare = 2 * LAYERS * 8 * size + 64
    for order, ops in want.items():
        for found in zf.launch(traffic, size, order, timeout=limit()):
            for op in found.keys() | ops.keys():
                exact = ops.get(op, 0) * one
                assert exact <= found.get(op, 0) <= exact + spare, (order, op, found, one)


def kept_gradients():
    """The largest number of full gradients alive at once during a backward with many buckets, under ZeRO-2."""
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = Wide()
    zerofn.sharded.reducer.into_buckets = functools.partial(
        zf.core.bucketed_views.into_buckets, limit=WIDTH * WIDTH * 8
    )
    opt = zf.attach(model, zf.chain(zf.reduce_scatter(), zf.sgd(0.1)))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    most = 0

    def note(g):
        nonlocal most
        found = set()
        for o in gc.get_objects():
            if isinstance(o, torch.Tensor) and o.untyped_storage().nbytes() >= WIDTH * WIDTH * 8:
                found.add(o.untyped_storage().data_ptr())
        most = max(most, len(found - weights))

    for block in model.blocks:
        block.register_forward_hook(lambda m, a, o: o.register_hook(note) and None)
    for step in range(3):
        x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank + 10 * step))
        model(x).square().sum().backward()
        assert all(map(is_gone, model.parameters()))
        opt.step()
        opt.zero_grad()
    return most


def test_zero2_never_holds_a_gradient_tree():
    for most in zf.launch(kept_gradients, 2, timeout=limit()):
        # Buffers under way, the one being packed and the gradient it is packed from; the tree has six.
        assert 1 <= most <= zerofn.sharded.reducer.IN_FLIGHT + 2 < LAYERS


def slow_rank_with_talk():
    """A rank without gradient for the first bucket, and a user's collective before the step that would send it."""
    zerofn.sharded.reducer.into_buckets = functools.partial(zf.core.bucketed_views.into_buckets, limit=400)
    out = {}
    for order, t in (("data parallel", zf.all_reduce), ("zero2", zf.reduce_scatter)):

        def program(model, rank, step, talk):
            x, y = P.batch(rank, step)
            out = model(x, None if rank == 0 else "a")
            loss = ((out - y) ** 2).mean() + (model.branch["b"](y[:, :1].expand(-1, 6)).sum() if rank == 1 else 0)
            loss = loss + (model.unused.sum() if rank == 1 else 0)
            loss.backward()
            talk()

        out[order] = P.eager(zf.chain(t(), zf.sgd(0.1, momentum=0.9)), program, 3, P.make())
    want = P.reference(2, lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9), program, 3, P.make())
    return {k: P.differences(v, want) for k, v in out.items()}


def test_a_collective_of_the_user_between_backward_and_step_never_waits_for_a_bucket():
    for found in zf.launch(slow_rank_with_talk, 2, timeout=limit()):
        assert all(worst < 1e-11 for worst, _ in found.values()), found


def gathered_buffers():
    """A gathered leaf of one element must not keep the buffer of its neighbours alive."""
    leaves = zf.core.layout.make_layout({"a": torch.ones(1), "b": torch.ones(50), "c": torch.ones(())})[0].leaves
    stage = zf.core.wires.Sharding(zf.ranks.process_groups.world_group())
    xs = {leaf.path: torch.arange(float(leaf.numel)) for leaf in leaves}
    got = stage.join_parts(stage.send_parts([stage.store(xs[leaf.path], leaf) for leaf in leaves], leaves)[1], leaves)
    assert all(torch.equal(g, xs[leaf.path]) for g, leaf in zip(got, leaves, strict=True))
    return [g.untyped_storage().nbytes() for g in got]


def test_gathered_leaves_have_memory_of_their_own():
    for sizes in zf.launch(gathered_buffers, 2, timeout=limit()):
        assert sum(sizes) <= 4 * (2 + 50 + 2) and dist.is_available()


def other_parameters():
    """The model called with parameters of the user's, then with its own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.scale_loss(8.0), zf.sgd(0.1)))
    mine = {"weight": torch.ones(2, 3, requires_grad=True), "bias": torch.ones(2, requires_grad=True)}
    x = torch.arange(3.0)[None]
    y = torch.func.functional_call(model, mine, (x,))
    y.sum().backward()
    alone = all(p.grad is None for p in model.parameters())
    parts = {n: p.detach().clone() for n, p in model.named_parameters()}
    by_parts = torch.func.functional_call(model, parts, (x,)) - model(x)
    try:
        torch.func.functional_call(model, {n: p.to_local() for n, p in parts.items()}, (x,))
    except RuntimeError as error:
        message = str(error)
    assert not by_parts.any()
    value = lambda p, x: torch.func.functional_call(model, p, (x,)).square().sum()  # noqa: E731
    per_example = torch.func.vmap(torch.func.grad(value), (None, 0))
    wrapped = []
    for params in (dict(model.named_parameters()), parts):
        for run in (torch.func.grad(value), lambda p, x: per_example(p, x[None])):
            with pytest.raises(RuntimeError) as error:
                run(params, x)
            wrapped.append(str(error.value))
    fulls = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    found = per_example(fulls, x[None])["weight"]
    assert torch.equal(found, 2 * torch.nn.functional.linear(x[None], fulls["weight"], fulls["bias"]).mT @ x[None])
    model(x).sum().backward()
    opt.step()
    grads = mine["weight"].grad.tolist(), mine["bias"].grad.tolist()
    return y.tolist(), *grads, alone, int(opt.state.step), message, wrapped


def test_a_call_with_other_parameters_uses_those():
    for y, weight, bias, alone, step, message, wrapped in zf.launch(other_parameters, 2, timeout=limit()):
        assert (y, weight, bias) == ([[4.0, 4.0]], [[0.0, 1.0, 2.0]] * 2, [1.0, 1.0])
        assert alone and step == 1
        assert "weight: given in shape (1, 3), in full it is (2, 3)" in message and "opt.gathered()" in message
        for told in wrapped:
            assert "torch.func of a call of a sharded model" in told and "p.full_tensor().detach()" in told


def functional_gradients(sharded):
    """Derivatives by the input that torch.func takes of a call of the model, and an ordinary backward after them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 1))).double()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1))) if sharded else torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    value = lambda x: model(x).sum()  # noqa: E731
    found = [
        torch.func.grad(value)(rows),
        torch.func.vjp(model, rows)[1](torch.ones(2, 1, dtype=torch.float64))[0],
        torch.func.jvp(value, (rows,), (torch.ones_like(rows),))[1],
        torch.func.vmap(torch.func.hessian(value))(rows),
        torch.func.vmap(torch.func.jacrev(model))(rows),
    ]
    x = rows.clone().requires_grad_()
    # A penalty on a gradient that torch.func has taken is differentiated by the parameters.
    (model(x).sum() + torch.func.grad(value)(x).square().sum()).backward()
    opt.step()
    _ = opt.detach() if sharded else None
    return [*(f.detach() for f in found), x.grad, *(p.detach() for p in model.parameters())]


def test_torch_func_over_a_sharded_model():
    want = functional_gradients(sharded=False)
    for found in zf.launch(functional_gradients, 2, True, timeout=limit()):
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)
            assert expected.abs().max() > 0


def evaluated_without_autograd(first, later, param_dtype, backwards):
    """The losses of a model that one rank alone evaluates between its steps, in modes of its own."""
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Sequential(nn.Linear(9, 9)), nn.Linear(9, 2))
    opt = zf.attach(model, zf.chain(zf.shard(), zf.precision(param_dtype=param_dtype), zf.sgd(0.1)))
    x = torch.ones(4, 6)
    losses = []
    for _ in range(3):
        for _ in range(backwards):
            for mode in (first, later) if rank == 0 else ():
                with mode():
                    model(x)
            loss = model(x).float().square().mean()
            loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("param_dtype", "backwards"),
    [
        (torch.float32, 2),
        (torch.bfloat16, 1),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((torch.float32, 1), (torch.bfloat16, 2))),
    ],
)
@pytest.mark.slow
def test_an_evaluation_in_inference_mode_on_one_rank_is_no_concern_of_training(param_dtype, backwards):
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "none": torch.enable_grad}
    want = None
    for first, later in (("none", "none"), ("no_grad", "inference"), ("inference", "inference")):
        args = modes[first], modes[later], param_dtype, backwards
        losses = zf.launch(evaluated_without_autograd, 2, *args, timeout=limit())
        want = want or losses
        assert losses == want and losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def detached_between():
    model = nn.Linear(3, 2)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    model(torch.ones(1, 3)).sum().backward()
    opt.detach()
    left = [p.grad for p in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    return left, [tuple(p.grad.shape) for p in model.parameters()]


def test_a_part_of_a_gradient_does_not_outlive_the_parts_of_its_parameter():
    for left, shapes in zf.launch(detached_between, 2, timeout=limit()):
        assert left == [None, None] and shapes == [(2, 3), (2,)]
