"""What travels with gradients under `shard`, and what memory they keep."""

from __future__ import annotations

import torch
from time_limits import limit
from torch import nn

import zerofn as zf

SIDE, ROWS = 8, 4


def gradients(freeze: tuple[str, ...]):
    """Gradients of two blocks on this rank, their storages, and bytes that were sent to sum them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)).double()
    for path in freeze:
        model.get_parameter(path).requires_grad_(False)
    full = {path: p.detach().clone() for path, p in model.named_parameters()}
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    group = opt._own.home.channels.groups[0]
    x = torch.linspace(-1, 1, ROWS * SIDE, dtype=torch.float64).reshape(ROWS, SIDE) + group.rank
    before = group.traffic.by_op.get("reduce_scatter", 0)
    model(x).square().sum().backward()
    sent = group.traffic.by_op["reduce_scatter"] - before
    found = {}
    for path, p in model.named_parameters():
        if p.grad is not None:
            g = p.grad.to_local()
            found[path] = g.clone(), g.untyped_storage().nbytes(), g._version
    return full, found, sent, x


def reference(full, xs, freeze):
    """The mean over ranks of gradients in one process."""
    total = {}
    for x in xs:
        model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)).double()
        model.load_state_dict(full)
        model(x).square().sum().backward()
        for path, p in model.named_parameters():
            if path not in freeze:
                total[path] = total.get(path, 0) + p.grad / len(xs)
    return total


def check(ranks, freeze):
    results = zf.launch(gradients, ranks, freeze, timeout=limit())
    expected = reference(results[0][0], [r[3] for r in results], freeze)
    for path, whole in expected.items():
        parts = torch.cat([r[1][path][0].reshape(-1) for r in results])
        # The order of a sum of three.
        assert torch.allclose(parts, whole.reshape(-1), rtol=1e-14, atol=1e-14), path
    return results


def test_frozen_leaves_send_nothing_beside_those_that_are_trained():
    for _, found, sent, _ in check(2, ("0.weight", "1.weight")):
        assert found.keys() == {"0.bias", "1.bias"}
        # Of each block: this rank's half of what the other one keeps, and a flag for it.
        assert sent == 2 * 8 * (SIDE // 2 + 1)


def test_gradients_of_a_block_are_one_buffer_and_counted_apart():
    half = 8 * (SIDE * SIDE // 2 + SIDE // 2 + 2)
    for _, found, _, _ in check(2, ()):
        assert [bytes_ for _, bytes_, _ in found.values()] == [half] * 4
        assert [version for _, _, version in found.values()] == [0] * 4


def test_gradients_on_ranks_with_uneven_rows():
    check(3, ())


def unused_bias():
    """A block of which one leaf is not used: the gradient of the other keeps no buffer of both."""
    torch.manual_seed(0)

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.ones(SIDE)), nn.Parameter(torch.ones(SIDE, SIDE))

        def forward(self, x):
            return x * self.used

    model = nn.Sequential(Half(), Half())
    zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    model(torch.ones(SIDE)).sum().backward()
    grads = [block.used.grad.to_local() for block in model]
    return [(g.tolist(), g.untyped_storage().nbytes()) for g in grads], model[0].unused.grad is None


def test_a_gradient_beside_leaves_without_one_has_memory_of_its_own():
    for found, none in zf.launch(unused_bias, 2, timeout=limit()):
        assert none and found == [([1.0] * (SIDE // 2), 4 * SIDE // 2)] * 2
