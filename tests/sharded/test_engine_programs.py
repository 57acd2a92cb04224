"""Programs that people write, with `zf.shard` and with FSDP2 as the engine, beside plain models."""

import re
from pathlib import Path

import pytest
import torch
from engine_programs import PROGRAMS, Averaged, Fsdp2, Ours
from time_limits import limit

import zerofn as zf

# What `fully_shard` of torch 2.13 does with a program where it does not what plain models do.
RAISES, WRONG, HANGS = "raises", "gives wrong numbers, without an error", "hangs"
OF_FSDP2 = {
    "a block skipped on one rank": HANGS,
    "an evaluation on one rank": HANGS,
    "a gradient penalty": "hangs, or ends the process",
    "a write into a parameter in forward": RAISES,
    "an exception in backward": WRONG,
    "an exception in backward, then reset_iter_state": WRONG,
    "hooks on parameters": RAISES,
    "tied across blocks": RAISES,
    "gradients by parameters": RAISES,
    "a penalty on gradients of parameters": RAISES,
    "a weight penalty in the loss": RAISES,
    "a number as a parameter": RAISES,
    "vmap of gradients by inputs": RAISES,
    "inference mode first": RAISES,
    "a dict with a view written in place": RAISES,
    "a module called from outside": RAISES,
    "functional call with full parameters": RAISES,
}
# The names of programs on the page.
IN_WORDS = {
    "a block skipped on one rank": "one rank skips a block",
    "an evaluation on one rank": "one rank evaluates alone",
    "a gradient penalty": "the loss penalizes the gradient of an input",
    "a write into a parameter in forward": "forward writes into a parameter",
    "an exception in backward": "backward raises, and training goes on",
    "an exception in backward, then reset_iter_state": "backward raises, then FSDP2's `reset_iter_state()` runs",
    "tied across blocks": "two blocks share a weight",
    "gradients by parameters": "a call of `torch.autograd.grad(loss, params)`",
    "a penalty on gradients of parameters": "the loss penalizes the gradients of parameters",
    "a weight penalty in the loss": "the loss penalizes weights",
    "a number as a parameter": "a 0-d parameter",
    "vmap of gradients by inputs": "`vmap` of gradients of inputs",
    "inference mode first": "the first forward runs in `torch.inference_mode()`",
    "a dict with a view written in place": "a block returns a view in a dict, and the model writes into the view",
    "a module called from outside": "the loss calls an inner module of the model",
    "functional call with full parameters": "a `functional_call` with full parameters",
}
PAGE = Path(__file__).parents[2] / "docs" / "fsdp2.md"


def compared(engine, names):
    """By name, how far a program is from the reference; or what it raised."""
    rank, found = torch.distributed.get_rank(), {}
    for name in names:
        want = PROGRAMS[name](Averaged(), rank)
        try:
            got = PROGRAMS[name](engine(), rank)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        same = got.keys() == want.keys() and all(got[k].shape == want[k].shape for k in want)
        far = [float((got[k].detach() - want[k].detach()).abs().max()) for k in want] if same else []
        found[name] = max(far) if same else "other tensors"
    return found


# What is done with parameters and gradients outside of forward, of which `test_outside_of_forward.py` has more;
# checkpoints inside of blocks by both ways, where one of each is enough; a checkpoint of torch, which
# `test_boundary_is_dtensor.py` loads; and what is the same for this engine.
ELSEWHERE = {
    *("clip grad norm", "a penalty on gradients of parameters", "a weight penalty in the loss", "averages by hand"),
    *("an optimizer of torch", "a gradient penalty", "two backwards then a step", "a tied head in the loss"),
    *("plain checkpoints of blocks", "reentrant checkpoints inside blocks", "a checkpoint of dcp"),
    "an exception in backward, then reset_iter_state",
}
SOON = [name for name in PROGRAMS if name not in ELSEWHERE]


@pytest.mark.parametrize("names", [SOON, pytest.param(list(PROGRAMS), marks=pytest.mark.slow)], ids=["few", "all"])
def test_shard_does_what_plain_models_do(names):
    assert PROGRAMS.keys() >= ELSEWHERE
    for found in zf.launch(compared, 2, Ours, names, timeout=limit(240)):
        # Sums over ranks and over uses of a tied weight are made in another order.
        assert {name: x for name, x in found.items() if not (isinstance(x, float) and x < 1e-12)} == {}


# torch's own engine changes with torch alone: of each answer a few.
FEW = ["tied weights", "clip grad norm", "a checkpoint of dcp", "hooks on parameters", "an exception in backward"]


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the table is of torch 2.13")
@pytest.mark.parametrize("names", [FEW, pytest.param(list(PROGRAMS), marks=pytest.mark.slow)], ids=["few", "all"])
def test_fsdp2_does_what_plain_models_do_or_what_the_page_says(names):
    names = [name for name in names if HANGS not in OF_FSDP2.get(name, "")]
    for found in zf.launch(compared, 2, Fsdp2, names, timeout=limit(240)):
        for name, x in found.items():
            said = OF_FSDP2.get(name, "right")
            did = RAISES if isinstance(x, str) else "right" if x < 1e-12 else WRONG
            assert did == said, (name, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, x in OF_FSDP2.items() if HANGS in x])
def test_fsdp2_hangs(name):
    with pytest.raises(Exception, match=r"did not finish|was killed"):
        zf.launch(compared, 2, Fsdp2, [name], timeout=limit(15))


def test_the_page_lists_the_programs():
    rows = dict(re.findall(r"^\| ([a-z`][^|]*) \| ([a-z][^|]*) \|$", PAGE.read_text(), re.M))
    assert {name: rows.get(IN_WORDS.get(name, name)) for name in OF_FSDP2} == OF_FSDP2
