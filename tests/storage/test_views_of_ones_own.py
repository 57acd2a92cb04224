"""What leaves for people and other libraries is what the model computes with, and what they give is stored by the view.

The reference is a plain model of torch with the same numbers.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_launch import one_launch
from safetensors.torch import load_file, save_file
from stages import STAGES, around, front
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import zerofn as zf
from zerofn.extend import Transform, View, as_it_is, transform

BF16 = torch.bfloat16


def turned(x, leaf):
    return x.flip(-len(leaf.shape))


@transform
def factor(by):
    view = View(view=lambda x, leaf: x * by, pull=lambda g, leaf: g * by, store=lambda x, leaf: x / by)
    return Transform("factor", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)


@transform
def upside_down():
    """Rows in the other order, of the matrices: no rank could tell from its own rows."""
    view = View(view=turned, pull=turned, store=turned, changes=lambda leaf: len(leaf.shape) > 1)
    return Transform("upside_down", needs="leaf", view_fn=lambda layout, ranks: view, through=as_it_is)


@transform
def on_a_grid(steps=8.0):
    view = View(view=lambda x, leaf: (x * steps).round() / steps, pull=lambda g, leaf: g, store=lambda x, leaf: x)
    return Transform("on_a_grid", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)


@transform
def by_its_state():
    view = View(
        view=lambda x, leaf, state: x * state["by"], pull=lambda g, leaf, state: g * state["by"], reads=True,
        store=lambda x, leaf: x / 4.0,
    )  # fmt: skip
    functions = {"init_fn": lambda leaves, layout: {"by": torch.tensor(4.0)}, "view_fn": lambda layout, ranks: view}
    return Transform("by_its_state", needs="element", through=as_it_is, **functions)


# Before what cuts, and behind it.
CHAINS = {
    "before": lambda stage: [factor(2.0), *front(stage)],
    "behind": lambda stage: [*front(stage), factor(2.0)],
    "rows": lambda stage: [upside_down(), *front(stage)],
    "both": lambda stage: [factor(4.0), upside_down(), *front(stage), factor(0.5)],
    "with a cast": lambda stage: [
        factor(2.0),
        *around(stage, zf.precision(param_dtype=BF16), window=zf.accumulate(2)),
    ],
    "reads": lambda stage: [by_its_state(), *front(stage)],
}


class Model(nn.Module):
    """Numbers that bf16 has, in rows that two and three ranks do not share evenly."""

    def __init__(self, seed):
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        numbers = lambda *shape: torch.randint(-8, 9, shape, generator=drawn) / 4.0  # noqa: E731
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)
        self.frozen = nn.Parameter(numbers(3, 2, 2), requires_grad=False)
        self.gain = nn.Parameter(numbers())
        for p in self.parameters():
            p.data = numbers(*p.shape)

    def forward(self, x):
        return self.last(self.first(x)) * self.gain + self.frozen.sum().to(x.dtype)


def wanted(seed):
    return {k: x.clone() for k, x in Model(seed).state_dict().items()}


def same(found, seed):
    want = wanted(seed)
    assert set(found) == set(want)
    for k, x in found.items():
        assert torch.equal(x.float(), want[k]), (k, x, want[k])


def computes(model, seed):
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 1.0]])
    torch.testing.assert_close(model(x).float(), Model(seed)(x), rtol=2e-2, atol=2e-2)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def together(fn, folder, *args):
    """What the first rank writes, for all of them."""
    if rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fn(*args)
    if dist.is_initialized():
        dist.barrier()


def leaves_as_seen(model, opt, tx, folder, seed):
    """Every way out."""
    computes(model, seed)
    with opt.gathered():
        same({k: x.clone() for k, x in model.state_dict().items()}, seed)
    together(lambda: None, folder)
    zf.export_safetensors(folder / "opt", opt)
    zf.export_safetensors(folder / "state", opt.state, tx=tx)
    if rank() == 0:
        same(load_file(folder / "opt"), seed)
        same(load_file(folder / "state"), seed)
    same(zf.full_params(tx, opt.state), seed)
    # Where what is stored is not what it computes with, these are refused.
    for outside in (model.state_dict, lambda: get_model_state_dict(model), lambda: model.load_state_dict(wanted(seed))):
        try:
            found = outside()
        except RuntimeError as error:
            told = str(error)
            assert "not what it computes with" in told and "first.weight" in told and "with opt.gathered():" in told
        else:
            if isinstance(found, dict):
                same({k: x.full_tensor() if hasattr(x, "full_tensor") else x for k, x in found.items()}, seed)


def from_a_file(model, opt, tx, folder, seed):
    together(lambda: save_file(wanted(seed), folder / "file"), folder)
    zf.load_safetensors(folder / "file", like=opt)


def from_a_file_into_a_state(model, opt, tx, folder, seed):
    together(lambda: save_file(wanted(seed), folder / "file"), folder)
    opt.load_state(zf.load_safetensors(folder / "file", like=opt.state, tx=tx))


def from_deepspeed(model, opt, tx, folder, seed):
    def write():
        for name, p in wanted(seed).items():
            if name != "frozen":
                (folder / "zero" / name).mkdir(parents=True)
                for what, x in {"fp32": p, "momentum": torch.zeros_like(p)}.items():
                    torch.save({"param": x}, folder / "zero" / name / f"{what}.pt")
                torch.save(torch.tensor(3.0), folder / "zero" / name / "step.pt")

    frozen = wanted(seed)["frozen"]
    together(write, folder)
    zf.load_deepspeed(folder, like=opt)
    with opt.gathered(), torch.no_grad():
        model.frozen.copy_(frozen)


def inside(model, opt, tx, folder, seed):
    with opt.gathered():
        model.load_state_dict(wanted(seed))


INTO = {
    "file": from_a_file,
    "file into a state": from_a_file_into_a_state,
    "DeepSpeed": from_deepspeed,
    "load_state_dict inside": inside,
}


def there_and_back(chain, folder, every):
    """At all stages in all ways, or on one rank at two stages, and on more in ways by turns."""
    folder, alone = Path(folder), not dist.is_initialized() or dist.get_world_size() == 1
    for at, stage in enumerate(STAGES if every or not alone else STAGES[::3]):
        name, (model, tx) = "attach", (Model(1), zf.chain(*CHAINS[chain](stage), zf.sgd(0.1, momentum=0.9)))
        opt = zf.attach(model, tx)
        try:
            leaves_as_seen(model, opt, tx, folder, 1)
            for seed, name in enumerate(list(INTO) if every or alone else list(INTO)[at % 2 :: 2], 2):
                INTO[name](model, opt, tx, folder, seed)
                leaves_as_seen(model, opt, tx, folder, seed)
            opt.detach()
            same(model.state_dict(), seed)
            computes(model, seed)
        except BaseException as error:
            error.add_note(f"{stage}, {name}")
            raise
    return True


QUICK = {1: tuple(CHAINS), 2: ("both",)}


@pytest.mark.parametrize(
    ("chain", "ranks"),
    [pytest.param(x, n, marks=() if x in QUICK.get(n, ()) else pytest.mark.slow) for x in CHAINS for n in (1, 2, 3)],
)
def test_all_ways_have_the_numbers_that_the_model_computes_with(chain, ranks):
    quick = QUICK.get(ranks, ())
    assert all(all_ways(ranks, quick if chain in quick else (chain,), chain not in quick)[chain])


@functools.cache
def all_ways(ranks, chains, every):
    with tempfile.TemporaryDirectory() as folder:
        found = one_launch(ranks, there_and_back, [(chain, f"{folder}/files", every) for chain in chains], 90)
        return {chain: ranks for (chain, *_), ranks in found.items()}


def latent(stage, folder):
    """Weights between points of a grid, which a checkpoint keeps and a file for others does not."""
    folder = Path(folder)
    model, tx = nn.Linear(2, 3, bias=False), zf.chain(on_a_grid(), *front(stage), zf.sgd(0.1), zf.ema(0.5))
    with torch.no_grad():
        model.weight.fill_(0.3)
    opt = zf.attach(model, tx)
    before = {k: x.clone() for k, x in opt.state.leaves.items()}
    together(lambda: None, folder)
    zf.export_safetensors(folder / "file", opt)
    zf.export_safetensors(folder / "average", opt, of="ema")
    zf.save(folder / "saved", opt)
    found = (
        [load_file(folder / name)["weight"].unique().tolist() for name in ("file", "average")] if rank() == 0 else []
    )
    found.append(zf.full_params(tx, opt.state)["weight"].unique().tolist())
    assert found == [[0.25]] * len(found)
    with opt.gathered():
        assert model.state_dict()["weight"].unique().tolist() == [0.25]
    assert all(torch.equal(x, before[k]) for k, x in opt.state.leaves.items())
    zf.load_safetensors(folder / "file", like=opt)
    assert not any(torch.equal(x, before[k]) for k, x in opt.state.leaves.items() if x.numel())
    zf.load(folder / "saved", like=opt)
    assert all(torch.equal(x, before[k]) for k, x in opt.state.leaves.items())
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_view_that_loses_something(ranks, tmp_path):
    found = one_launch(ranks, latent, [(stage, str(tmp_path / "files")) for stage in STAGES])
    assert all(all(each) for each in found.values())


def test_a_state_does_not_say_by_which_view_it_is_seen(tmp_path):
    tx = zf.chain(factor(2.0), zf.sgd(0.1))
    state = zf.init(tx, {"w": torch.ones(2)})
    with pytest.raises(TypeError, match=r"sees it through factor(.|\n)*tx=tx"):
        zf.export_safetensors(tmp_path / "file", state)
    zf.export_safetensors(tmp_path / "file", state, tx=tx)
    assert load_file(tmp_path / "file")["w"].tolist() == [1.0, 1.0] and state.params["w"].tolist() == [0.5, 0.5]


def test_parameters_themselves_are_what_is_stored():
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    opt = zf.attach(model, zf.chain(factor(2.0), zf.sgd(0.1)))
    assert model.state_dict(keep_vars=True)["weight"] is model.weight and model.weight.tolist() == [[1.5, 1.5]]
    with opt.gathered():
        assert model.state_dict()["weight"].tolist() == [[3.0, 3.0]]
    opt.detach()
    assert model.state_dict()["weight"].data_ptr() == model.weight.data_ptr() and model.weight.tolist() == [[3.0, 3.0]]
