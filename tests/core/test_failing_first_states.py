"""A first state of whole leaves that fails at the owner of one: all ranks know in the same call, and may make another.

The reference is the same run without that call.
"""

import pytest
import torch
from test_failing_owners import F64, loss_of, make, wires
from time_limits import limit
from torch.func import functional_call

import zerofn as zf


def root_of(x, shift):
    """Of a matrix that is positive definite, but for one leaf, which one rank owns, and this shift."""
    square = x @ x.mT if x.dim() == 2 else x[:, None] * x
    sign = -shift if x.shape == (7, 5) else 1.0
    return torch.linalg.cholesky(square + sign * torch.eye(len(x), dtype=x.dtype, device=x.device))


def rooted(shift):
    @zf.leafwise(init=lambda x: root_of(x, shift))
    def whiten(grad, param, root):
        matrix = grad if grad.dim() == 2 else grad[:, None]
        return torch.linalg.solve_triangular(root, matrix, upper=False).view_as(grad), root

    return whiten()


def begin(stage, route, failures):
    """Parameters after three steps, begun once these have failed; and what was said there."""
    model, said = make(), []
    x = torch.ones(4, 5, dtype=F64)
    tree = lambda: {n: p.detach().clone() for n, p in model.named_parameters()}  # noqa: E731
    # Two of them: what the second one sends would meet what others send next.
    chain = lambda shift: zf.chain(*wires(stage), rooted(shift), rooted(-1.0), zf.sgd(0.1))  # noqa: E731
    for _ in range(failures):
        try:
            zf.attach(model, chain(100.0)) if route == "attached" else zf.init(chain(100.0), tree())
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    if route == "attached":
        opt = zf.attach(model, chain(-1.0))
        for i in range(3):
            loss_of(model(x), 2 * i).backward()
            opt.step()
            opt.zero_grad()
        with opt.gathered():
            return [p.detach().clone() for p in model.parameters()], said
    tx = chain(-1.0)
    state = zf.init(tx, tree())
    step = zf.make_step(lambda params: loss_of(functional_call(model, params, (x,)), 0), tx)
    for _ in range(3):
        state, _ = step(state)
    return list(zf.full_params(tx, state).values()), said


@pytest.mark.parametrize("route", [pytest.param("attached", marks=pytest.mark.slow), "pure"])
@pytest.mark.parametrize(
    ("stage", "size"),
    [(zf.shard, 2), (zf.reduce_scatter, 2), pytest.param("nested", 4, marks=pytest.mark.slow)],
)
def test_ranks_begin_again_after_a_first_state_that_failed_at_one_owner(stage, size, route):
    found = zf.launch(begin, size, stage, route, 2, timeout=limit(60))
    without = zf.launch(begin, size, stage, route, 0, timeout=limit(60))
    own = [rank for rank in range(size) if found[rank][1][0].startswith("_LinAlgError")]
    assert len(own) == 1
    for rank in set(range(size)) - set(own):
        assert len(found[rank][1]) == 2
        for told in found[rank][1]:
            assert "OwnerFailed: a first state of whole leaves (init=) that failed" in told
            assert f"rank {own[0]}: _LinAlgError: linalg.cholesky: " in told
    for (params, _), (same, nothing) in zip(found, without, strict=True):
        assert nothing == []
        # To the bit: what failed has left nothing behind.
        assert all(torch.equal(x, y) for x, y in zip(params, same, strict=True))
