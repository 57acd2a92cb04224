"""Files and messages have the names of the plain model, whatever wraps its modules."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from time_limits import limit
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zerofn as zf
from zerofn.core import wrapper_names  # inside: names by themselves

# The compiler looks whether a view has a .grad, and would hide the warning if warnings were no errors here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
BACKEND = "eager"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        # As a module of a user's may be called.
        self.module = nn.Linear(5, 5)
        self.register_buffer("scale", torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.module(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(3, 5), nn.ModuleList([Block(), Block()])
        # In evaluation: what a checkpoint repeats would count twice in its statistics.
        self.norm, self.last = nn.BatchNorm1d(5).eval(), nn.Linear(5, 3)
        self.norm.running_mean.uniform_()  # type: ignore[union-attr]
        self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def blocks(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = Net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(block)
    return model


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend=BACKEND)


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "compiled": lambda: compiled(Net()),
    "compiled blocks": lambda: blocks(compiled),
    "checkpoint blocks": lambda: blocks(checkpoint_wrapper),
    "checkpoint": lambda: checkpoint_wrapper(Net()),
    "compiled, of checkpoint blocks": lambda: compiled(blocks(checkpoint_wrapper)),
    "compiled checkpoint blocks": lambda: blocks(lambda m: compiled(checkpoint_wrapper(m))),
    "DataParallel": lambda: nn.DataParallel(Net()),
}
CHAINS = {
    "whole": lambda: zf.low_precision_adam(0.05, state_dtype=torch.bfloat16, rounding="stochastic"),
    "reduce_scatter": lambda: zf.chain(zf.reduce_scatter(), zf.adamw(0.05)),
    "shard": lambda: zf.chain(zf.shard(), zf.adamw(0.05)),
}


def attached(how: str, chain: str) -> tuple[nn.Module, Any]:
    model = WRAPPED[how]()
    return model, zf.attach(model, CHAINS[chain]())


def train(model: nn.Module, opt: Any, steps: range) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for i in steps:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * i + rank))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def everything(model: nn.Module, opt: Any) -> list[Tensor]:
    states = [x for x in torch.utils._pytree.tree_leaves(opt.state_dict()) if isinstance(x, Tensor)]
    with opt.gathered():
        own = [x.detach().clone() for x in (*model.parameters(), *model.buffers())]
    return own + [getattr(x, "_local_tensor", x) for x in states]


def shared_directory() -> Path:
    names = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return Path(names[0])


def by_checkpoint(opt: Any, other: Any) -> None:
    directory = shared_directory()
    zf.save(directory, opt)
    zf.load(directory, like=other)


def by_state_dict(opt: Any, other: Any) -> None:
    other.load_state_dict(opt.state_dict())
    with opt.gathered(), other.gathered():
        for a, b in zip(other._own.model.buffers(), opt._own.model.buffers(), strict=True):
            a.copy_(b)


def went_on(source: str, target: str, chain: str, form: Callable[[Any, Any], None]) -> bool:
    """Whether a run that went on in another wrapping is, to the bit, the run without a break."""
    model, opt = attached(source, chain)
    train(model, opt, range(2))
    other, resumed = attached(target, chain)
    form(opt, resumed)
    train(model, opt, range(2, 4))
    train(other, resumed, range(2, 4))
    pairs = zip(everything(model, opt), everything(other, resumed), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def broken(chains: list[str], pairs: list[tuple[str, str]]) -> list[Any]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # Reentrant checkpoints and DataParallel have warnings of torch's; ours would be an error.
        warnings.filterwarnings("error", message="zf|opt")
        forms = (by_checkpoint, by_state_dict)
        cells = [(a, b, chain, form) for chain in chains for a, b in pairs for form in forms]
        return [cell[:3] for cell in cells if not went_on(*cell)]


TO_PLAIN = [(how, "plain") for how in WRAPPED if how != "plain"]
FROM_PLAIN = [("plain", how) for how in WRAPPED if how != "plain"]


def test_a_run_goes_on_in_another_wrapping():
    assert broken(["whole"], [*TO_PLAIN[:3], *FROM_PLAIN[2:4]]) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_goes_on_in_any_wrapping_on_ranks(size: int):
    # The threads of DataParallel have no place among ranks.
    pairs = [x for x in [*TO_PLAIN, *FROM_PLAIN, ("compiled", "checkpoint blocks")] if "DataParallel" not in x]
    for found in zf.launch(broken, size, ["reduce_scatter", "shard"], pairs, timeout=limit(200)):
        assert found == []


NAMES = ["first.weight", "blocks.0.module.weight", "blocks.1.scale", "norm.running_mean", "last.weight"]


@pytest.mark.parametrize("how", WRAPPED)
def test_all_that_is_shown_has_the_names_of_the_plain_model(how: str, tmp_path: Path):
    model, opt = attached(how, "whole")
    expected = [n for n, _ in Net().named_parameters()]
    assert list(opt.state.params) == expected
    zf.export_safetensors(tmp_path / "file", opt)
    assert sorted(load_file(tmp_path / "file")) == sorted(expected)
    for shown in (str(zf.describe(opt)), str(zf.plan(CHAINS["whole"](), model)), repr(opt.state_dict().keys())):
        assert "_orig_mod" not in shown and "_wrapped" not in shown
    zf.save(tmp_path / "saved", opt)
    written = (tmp_path / "saved" / "zerofn.json").read_text()
    assert "_orig_mod" not in written and "_checkpoint_wrapped" not in written
    assert all(f"{name}" in written for name in NAMES)


@pytest.mark.parametrize("how", ["compiled", "compiled blocks"])
def test_files_with_names_of_wrapped_modules_are_refused_and_read_without(how: str, tmp_path: Path):
    model = WRAPPED[how]()
    theirs = torch.optim.AdamW(model.named_parameters(), 0.1)
    sum(p.square().sum() for p in model.parameters()).backward()
    theirs.step()
    save_file({k: x.detach().clone() for k, x in model.named_parameters()}, tmp_path / "file")
    given = theirs.state_dict()
    other = Net()
    opt = zf.attach(other, zf.adamw(0.1))
    for form in (opt.load_state_dict, lambda _: zf.load_safetensors(tmp_path / "file", like=opt)):
        with pytest.raises(ValueError, match=r"name.replace\('_orig_mod.', '', 1\)"):
            form(given)
    group = given["param_groups"][0]
    group["param_names"] = [name.replace("_orig_mod.", "") for name in group["param_names"]]
    opt.load_state_dict(given)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(opt.state[a]["exp_avg"], theirs.state[b]["exp_avg"])


def test_materialized_as_the_plain_model():
    def made(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        with torch.device("meta"):
            model = wrap(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1))))
        zf.materialize(model, zf.sgd(0.1), seed=3)
        return [p.detach() for p in model.parameters()]

    for wrap in (compiled, checkpoint_wrapper, lambda m: nn.Sequential(m[0], compiled(m[1]))):
        assert all(map(torch.equal, made(wrap), made(lambda m: m)))


def groups(labels: Any, model: nn.Module) -> list[int]:
    tx = zf.partition({"no": zf.sgd(0.1), "yes": zf.sgd(0.2)}, labels)
    return [len(group["params"]) for group in zf.attach(model, tx).param_groups]


def test_labels_by_names():
    model = compiled(Net())
    plain, wrapped = ({n: "no" if p.ndim == 1 else "yes" for n, p in m.named_parameters()} for m in (Net(), model))
    expected = groups(plain, Net())
    assert min(expected) > 0
    for labels in (plain, plain.__getitem__, lambda path: "no" if plain[path] == "no" else "yes"):
        assert groups(labels, compiled(Net())) == expected
    with pytest.raises(ValueError, match=r"_orig_mod\.first\.weight"):
        groups(wrapped, compiled(Net()))
    one = {"first.weight"}
    for labels in (
        wrapped.__getitem__,
        lambda path: "no" if path in {n for n, x in wrapped.items() if x == "no"} else "yes",
    ):
        with pytest.raises(ValueError, match=r"labels for names such as '_orig_mod.first.weight': of 'first.weight'"):
            groups(labels, compiled(Net()))
    # What treats all leaves alike, by whatever name, is right.
    zf.attach(compiled(Net()), zf.chain(zf.masked(zf.clip_by_value(1.0), lambda path: True), zf.sgd(0.1)))
    with pytest.raises(ValueError, match="mask for names such as"):
        decays = zf.masked(zf.clip_by_value(1.0), lambda path: path not in {f"_orig_mod.{n}" for n in one})
        zf.plan(zf.chain(decays, zf.sgd(0.1)), compiled(Net()))


@pytest.mark.parametrize("wrap", [lambda m: m, checkpoint_wrapper, nn.DataParallel, compiled])
def test_modules_of_torch_jit_have_their_names(wrap: Callable[[nn.Module], nn.Module]):
    """Their submodules are in no dict, and are asked for by name. To attach one is refused under its name."""
    model = wrap(nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))))
    assert {"0", "1", "1.0", "1.1"} <= {name for name, _ in wrapper_names.modules_of(model)}
    assert "1.1.running_mean" in wrapper_names.saved_buffers(model)
    with pytest.raises(ValueError, match=r"compiled by torch.jit(.|\n)*\n  1: RecursiveScriptModule"):
        zf.attach(model, zf.sgd(0.1))
