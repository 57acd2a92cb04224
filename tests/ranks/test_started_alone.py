"""What one rank starts alone, after an error that it has caught or because one is raised there: all ranks are told."""

import pytest
import rank_programs as P
import torch
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


@zf.leafwise(needs="element")
def fails(grad, param, *, on=-1):
    if on == P.rank_and_size()[0]:
        raise ArithmeticError("of this rank alone")
    return grad


def stage(first, on):
    return zf.chain(first(), fails(on=on), zf.clip_by_global_norm(1.0), zf.sgd(0.1))


def attached_anew(first):
    """Rank 1 catches what its step raises, and attaches another model where rank 0 is in the step."""
    rank, _ = P.rank_and_size()
    model = linear()
    opt = zf.attach(model, stage(first, 1))
    model(torch.ones(2, 4)).sum().backward()
    said = []
    try:
        opt.step()
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
    except (ArithmeticError, RuntimeError) as error:
        said.append(str(error))
    if rank == 1:
        with pytest.raises(RuntimeError) as caught:
            zf.attach(linear(), stage(first, -1))
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("first", [pytest.param(zf.all_reduce, marks=pytest.mark.slow), zf.shard])
def test_attaching_anew_on_one_rank_is_told_on_both(first):
    other, mine = zf.launch(attached_anew, 2, first, timeout=limit())
    assert "this rank waits in" in other[0] and "rank 1" in other[0]
    assert mine[0] == "of this rank alone"
    assert mine[1].startswith("zf.attach(model, tx) on rank 1 and not on every rank")
    assert "it waits for rank 1 in all_" in mine[1]


def opened_alone():
    """Rank 1 opens groups for another mesh where rank 0 computes with a sharded model."""
    rank, _ = P.rank_and_size()
    mesh = init_device_mesh("cpu", (2,))
    model = linear()
    zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    if rank == 1:
        zf.attach(linear(), zf.chain(zf.shard(mesh), zf.sgd(0.1)))
    model(torch.ones(2, 4)).sum().backward()


def test_a_group_that_one_rank_opens_is_told_to_who_waits_for_it():
    with pytest.raises(zf.RankError, match=r"the opening of a group on rank 1 and not on every rank"):
        zf.launch(opened_alone, 2, timeout=limit())


def first_states_of_one_rank():
    """An `init` that raises on rank 1 alone; then one that does not, among the same ranks."""
    rank, _ = P.rank_and_size()
    tells = iter([True, False])

    def first(p):
        if rank == 1 and next(tells, False):
            raise ArithmeticError("of this rank alone")
        return torch.zeros_like(p)

    @zf.leafwise(init=first, needs="element")
    def kept(grad, param, state):
        return grad, state

    params = {"w": torch.ones(4, 2)}
    tx = zf.chain(zf.shard(), kept(), zf.sgd(0.5))
    said = None
    try:
        zf.init(tx, params)
    except (ArithmeticError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    state = zf.init(tx, params)
    state, _ = zf.make_step(lambda p, x: (p["w"] * x).sum(), tx)(state, torch.full((4, 2), 1.0 + rank))
    return said, zf.full_params(tx, state)["w"]


def test_a_first_state_that_fails_on_one_rank_fails_on_all():
    for rank, (said, w) in enumerate(zf.launch(first_states_of_one_rank, 2, timeout=limit())):
        if rank == 1:
            assert said == "ArithmeticError: of this rank alone"
        else:
            assert said is not None and said.startswith("RuntimeError: first states failed on rank 1")
        # Mean gradient 1.5 of both ranks: 1 - 0.5 * 1.5.
        assert torch.equal(w, torch.full((4, 2), 0.25))
