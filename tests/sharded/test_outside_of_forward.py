"""Everything that is done with sharded parameters and gradients outside of forward: right, or refused by path.

Each program runs on ranks under `shard` and, where it is to be right, on a plain model in one process. Ranks have
the same rows, so that the mean over ranks is the gradient of one.
"""

import io
import re

import numpy as np
import pytest
import torch
from outside_programs import RIGHT, Both, attached_run, loss_of, make, plain_run
from rank_programs import rank_and_size
from small_parts import said
from time_limits import limit
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

import zerofn as zf

# What changes nothing.
LOOKING = ("numbers_of_parameters", "numbers_of_gradients", "products_of_hessians")


def sharded_runs(programs):
    return {program.__name__: attached_run(program, zf.chain(zf.shard(), zf.sgd(0.1))) for program in programs}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_right(ranks):
    before = [p.detach() for p in make().parameters()]
    want = {program.__name__: plain_run(program) for program in RIGHT}
    for found in zf.launch(sharded_runs, ranks, RIGHT, timeout=limit()):
        for name, (value, after) in found.items():
            # float64, sums over ranks in another order.
            near = {"rtol": 1e-11, "atol": 1e-13, "msg": lambda m, name=name: f"{name}: {m}"}
            torch.testing.assert_close(value, want[name][0], **near)
            for old, new, expected in zip(before, after, want[name][1], strict=True):
                torch.testing.assert_close(new - old, expected - old, **near)
            assert name in LOOKING or not all(map(torch.equal, before, after)), name


# -- what is refused ----------------------------------------------------------------------------------------

PAIR = r"of the sharded parameter pair.weight(.|\n)*"
IN_BACKWARD = PAIR + r"in the middle of\n(.|\n)*grad_norm(.|\n)*clip_by_global_norm(.|\n)*to_local"
SAVED = r"saving (.|\n)*opt.gathered\(\)(.|\n)*zf.save"
LOST = r"of a view of what was gathered(.|\n)*p.grad\[index\] = new"


def by_a_hook(fn):
    def mistake(b):
        handle = b.w.register_hook(fn)
        try:
            loss_of(b.model).backward()
        finally:
            handle.remove()

    return mistake


def after_its_gradient(b):
    handle = b.w.register_post_accumulate_grad_hook(lambda p: clip_grad_norm_(p, 1.0))
    try:
        loss_of(b.model).backward()
    finally:
        handle.remove()


REFUSED = {
    "noise of a part": (lambda b: b.w.data.add_(torch.ones(1, 1, 2, 4)), r"shape"),
    "by a hook": (by_a_hook(lambda g: g / g.norm()), IN_BACKWARD),
    "another whole in a hook": (by_a_hook(lambda g: g * torch.ones(3, 2, 4)), IN_BACKWARD),
    "a product in a hook": (by_a_hook(lambda g: g.T @ g), IN_BACKWARD),
    "an index in a hook": (by_a_hook(lambda g: g[0]), IN_BACKWARD),
    "after its gradient": (after_its_gradient, IN_BACKWARD),
    "average": (lambda b: AveragedModel(b.model), r"copy.deepcopy\(model\)(.|\n)*opt.gathered\(\)"),
    "a row in place": (lambda b: b.w.grad[0].zero_(), LOST),
    "a column in place": (lambda b: b.w.grad.T[0].mul_(2), LOST),
    "added to": (lambda b: b.w.grad[0].__iadd__(1), LOST),
    "rows in place": (lambda b: [x.mul_(2) for x in b.w.data], LOST),
    "in place by out": (lambda b: torch.add(b.w.grad[0], 1.0, out=b.w.grad[0]), LOST),
    "pickled": (lambda b: torch.save({"w": b.w.data}, io.BytesIO()), SAVED),
    "pickled state": (lambda b: torch.save(b.model.state_dict(), io.BytesIO()), SAVED),
    "by NumPy": (lambda b: b.w.detach().numpy(), SAVED),
    "as an array": (lambda b: np.asarray(b.w.grad), SAVED),
    "another shape": (lambda b: setattr(b.w, "data", torch.ones(4, 2)), r"p.data = x of shape \(4, 2\)(.|\n)*\(2, 4\)"),
    "a transpose in place": (lambda b: b.w.data.t_(), PAIR),
    "a view in place": (lambda b: b.w.view(-1)[0].zero_(), r"writes into a parameter(.|\n)*opt.gathered\(\)"),
}  # fmt: skip


def what_is_said():
    rank_and_size()
    found = {}
    for name, (mistake, _) in REFUSED.items():
        model = make()
        opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
        loss_of(model).backward()
        before = [p.detach().clone() for p in model.parameters()]
        b = Both(model, opt.step, opt.gathered)
        found[name] = str(said(lambda b=b, f=mistake: f(b)))
        assert all(map(torch.equal, before, [p.detach() for p in model.parameters()])), name
        # The ranks are where they were: no collective is left open.
        opt.zero_grad()
        loss_of(model).backward()
        opt.step()
        opt.detach()
    return found


def test_the_rest_is_refused_by_path():
    for found in zf.launch(what_is_said, 2, timeout=limit()):
        assert found.keys() == REFUSED.keys()
        for name, (_, pattern) in REFUSED.items():
            assert re.search(pattern, found[name]), f"{name}: {found[name]}"
