"""Open windows before a reduction, with a view behind it that changes gradients, at another number of ranks.

On several ranks such a sum has yet to come through the view, on one it has: to read one as the other is a wrong step.
"""

import torch
import torch.distributed as dist
from small_parts import said
from time_limits import limit

import zerofn as zf
from zerofn.extend import Transform, View, as_it_is

STEPS = 5


def doubling():
    """The model sees twice what is stored."""
    view = View(view=lambda x, leaf: 2 * x, pull=lambda g, leaf: 2 * g, store=lambda x, leaf: x / 2)
    return Transform("doubling", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)


def made(size):
    tx = zf.chain(zf.accumulate(2), zf.all_reduce(), doubling(), zf.sgd(0.01, momentum=0.5))
    x = torch.randn(STEPS, 2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rank = dist.get_rank() if dist.is_initialized() and size > 1 else None
    batches = [y.flatten(0, 1) if rank is None else y[rank] for y in x]
    start = {"w": torch.ones(3, dtype=torch.float64)}
    return tx, zf.init(tx, start), zf.make_step(lambda p, x: (x @ p["w"]).square().mean(), tx), batches


def go(size, saves=(), directory=None, first=0, state=None):
    """Steps from `first` on, saved after those in `saves`; what they have moved."""
    tx, new, step, batches = made(size)
    state = new if state is None else state
    for i in range(first, STEPS):
        state, _ = step(state, batches[i])
        if i + 1 in saves:
            zf.save(directory / f"{i + 1}", state)
    return zf.full_params(tx, state)["w"] - 1


def go_on(size, directory, first):
    _, like, _, _ = made(size)
    return go(size, first=first, state=zf.load(directory / f"{first}", like=like))


def say(directory, first):
    return said(lambda: go_on(2, directory, first))


def test_they_are_refused_where_their_gradients_have_come_through_other_views(tmp_path):
    alone = go(1, (2, 3), tmp_path / "1")
    assert alone.abs().min() > 1e-3
    # float64; a mean of two means in the place of one.
    near = {"rtol": 1e-12, "atol": 0}
    for moved in zf.launch(go, 2, 2, (2, 3), tmp_path / "2", timeout=limit()):
        torch.testing.assert_close(moved, alone, **near)
    # A window that is closed, and one that is open at the same number of ranks.
    torch.testing.assert_close(go_on(1, tmp_path / "2", 2), alone, **near)
    for directory, first in ((tmp_path / "1", 2), (tmp_path / "2", 3)):
        for moved in zf.launch(go_on, 2, 2, directory, first, timeout=limit()):
            torch.testing.assert_close(moved, alone, **near)
    told = [said(lambda: go_on(1, tmp_path / "2", 3)), *zf.launch(say, 2, tmp_path / "1", 3, timeout=limit())]
    for message in told:
        assert "whether they have come through doubling" in str(message) and "opt.is_boundary" in str(message)
