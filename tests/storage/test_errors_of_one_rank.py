"""An error of one rank in a save or a load is raised by all, and `zf.launch` names the rank that had it first."""

import errno

import pytest
import torch
import torch.distributed as dist
from time_limits import limit

import zerofn as zf
from zerofn.ranks.backend import raised_on, rank_of  # inside: how ranks tell whose error it is
from zerofn.storage import pieces  # inside: to fail on one rank


def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def program(what, bad, directory):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(0.1)))
    here = dist.get_rank() == bad
    if what == "save":
        pieces.create = fail if here else pieces.create
        zf.save(directory, opt)
    elif what == "save of a state":
        pieces.create = fail if here else pieces.create
        tx = zf.chain(zf.reduce_scatter(), zf.adamw(0.1))
        zf.save(directory, zf.init(tx, {"w": torch.zeros(4, 3)}))
    elif what == "load":
        zf.save(directory, opt)
        pieces.open_regular = fail if here else pieces.open_regular
        zf.load(directory, like=opt)
    elif what == "load_state_dict":
        saved = opt.state_dict()
        if here:
            saved["state"] = {0: {"step": 1}}
        opt.load_state_dict(saved)


# Either rank in turn.
WHERE = {"save": 1, "save of a state": 0, "load": 1, "load_state_dict": 0}


@pytest.mark.parametrize(
    ("what", "bad"),
    [
        pytest.param(what, bad, marks=() if bad == often else pytest.mark.slow)
        for what, often in WHERE.items()
        for bad in (0, 1)
    ],
)
def test_the_rank_that_had_the_error(what, bad, tmp_path):
    with pytest.raises(zf.RankError, match=f"rank {bad} raised") as caught:
        zf.launch(program, 2, what, bad, str(tmp_path), timeout=limit())
    assert caught.value.rank == bad


def test_a_mark_is_found_below_other_errors():
    try:
        try:
            raise raised_on(ValueError("inner"), 2)
        except ValueError as error:
            raise OSError("outer") from error
    except OSError as error:
        assert rank_of(error) == 2
    assert rank_of(ValueError()) is None
