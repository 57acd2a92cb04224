"""Runs of DeepSpeed go on here: universal checkpoints and consolidated weights, written by hand in their layouts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import FIRST
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zerofn as zf

RATE, DECAY = 1e-2, 0.1
FULL = StateDictOptions(full_state_dict=True)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))
    model[3].requires_grad_(False)
    return model


def train(model: nn.Module, opt: Any, first: int, last: int) -> None:
    """On the same data on every rank, whose mean is then that of one process."""
    for i in range(first, last):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), RATE, weight_decay=DECAY, fused=True)


def written(directory: str, model: nn.Module, opt: torch.optim.Optimizer, flat: bool = False) -> None:
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        folder = Path(directory, "zero", name)
        folder.mkdir(parents=True)
        for file, x in {"fp32": p.detach(), **opt.state[p]}.items():
            x = x.clone().reshape(-1) if flat else x.clone()
            torch.save(x if file == "step" else {"param": x, "cat_dim": 0}, folder / f"{file}.pt")


def _goes_on(directory: str, consolidated: str) -> list[str]:
    straight, wrong = net(), []
    optimizer = adamw(straight)
    train(straight, optimizer, 0, 3)
    start, state = copy.deepcopy(straight.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    train(straight, optimizer, 3, 5)
    after = straight.state_dict()
    for stage, first in FIRST.items():
        model = net(7)
        model.load_state_dict({k: x for k, x in torch.load(consolidated).items() if k.startswith("3.")}, strict=False)
        opt = zf.attach(model, zf.chain(first(), zf.adamw(RATE, weight_decay=DECAY), zf.ema(0.5)))
        # The consolidated file has had them.
        with pytest.warns(UserWarning, match=r"does not have these frozen parameters; .*: 3.weight, 3.bias"):
            zf.load_deepspeed(directory, like=opt)
        found = get_optimizer_state_dict(model, opt, options=FULL)["state"]
        for i, kept in state.items():
            now = found[[name for name, p in model.named_parameters() if p.requires_grad][i]]
            wrong += [f"{stage} {i} {k}" for k, x in kept.items() if not torch.equal(now[k], x)]
        with opt.averaged(), opt.gathered():
            wrong += [f"{stage} average {k}" for k, x in model.state_dict().items() if not torch.equal(x, start[k])]
        with opt.gathered():
            wrong += [f"{stage} {k}" for k, x in model.state_dict().items() if not torch.equal(x, start[k])]
        train(model, opt, 3, 5)
        wrong += [] if int(opt.state.step) == 5 else [f"{stage} step"]
        with opt.gathered():
            # Two kernels of Adam round the ends of parts otherwise, by about 1e-7 of a change.
            wrong += [
                f"{stage} later {k}"
                for k, x in model.state_dict().items()
                if (x - after[k]).norm() > 1e-5 * (after[k] - start[k]).norm()
            ]
        opt.detach()
    model = net(7)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(RATE)))
    model.load_state_dict(torch.load(consolidated))
    with opt.gathered():
        wrong += [f"consolidated {k}" for k, x in model.state_dict().items() if not torch.equal(x, start[k])]
    return wrong


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
@pytest.mark.parametrize("flat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_goes_on_at_every_stage(tmp_path, flat):
    model = net()
    opt = adamw(model)
    train(model, opt, 0, 3)
    written(str(tmp_path), model, opt, flat)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    given = str(tmp_path), str(tmp_path / "pytorch_model.bin")
    found = [_goes_on(*given)] if flat else zf.launch(_goes_on, 2, *given, timeout=limit())
    assert found == [[]] * len(found)


def test_what_does_not_fit_is_named_at_once_and_nothing_changes(tmp_path):
    model = net()
    opt = adamw(model)
    train(model, opt, 0, 1)
    written(str(tmp_path), model, opt)
    zero = tmp_path / "zero"
    (zero / "0.bias" / "exp_avg_sq.pt").unlink()
    torch.save(torch.zeros(2), zero / "0.weight" / "momentum_buffer.pt")
    torch.save({"param": torch.zeros(5, 3)}, zero / "2.weight" / "exp_avg.pt")
    torch.save({"param": torch.zeros(3, dtype=torch.bfloat16)}, zero / "2.bias" / "exp_avg.pt")
    (zero / "head.weight").mkdir()
    other = net(7)
    before = copy.deepcopy(other.state_dict())
    attached = zf.attach(other, zf.adamw(RATE))
    with pytest.raises(ValueError) as error:
        zf.load_deepspeed(tmp_path, like=attached)
    for words in (
        "0.bias: exp_avg_sq.pt is missing",
        "0.weight: momentum_buffer.pt is of another optimizer",
        "2.weight: exp_avg.pt is of shape (5, 3) instead of (3, 5)",
        "2.bias: exp_avg.pt is of torch.bfloat16 instead of torch.float32",
        "head.weight: is in the checkpoint and not in the model",
    ):
        assert words in str(error.value)
    assert all(torch.equal(x, before[k]) for k, x in other.state_dict().items())
    (zero / "2.bias" / "exp_avg.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"exp_avg.pt is damaged(?s:.*)could not be read"):
        zf.load_deepspeed(tmp_path, like=attached)
    with pytest.raises(FileNotFoundError, match=r"no folder zero in it(?s:.*)ds_to_universal"):
        zf.load_deepspeed(zero, like=attached)
    with pytest.raises(TypeError, match="not attached"):
        zf.load_deepspeed(tmp_path, like=attached.state)


def _on_one_rank_alone(directory: str) -> str:
    opt = zf.attach(net(), zf.chain(zf.shard(), zf.adamw(RATE)))
    try:
        zf.load_deepspeed(directory if dist.get_rank() == 0 else f"{directory}/zero", like=opt)
    except FileNotFoundError as error:
        return str(error)
    return ""


def test_what_one_rank_does_not_find_no_rank_loads(tmp_path):
    model = net()
    opt = adamw(model)
    train(model, opt, 0, 1)
    written(str(tmp_path), model, opt)
    assert all("no folder zero" in said for said in zf.launch(_on_one_rank_alone, 2, str(tmp_path), timeout=limit()))


@zf.leafwise(optimizer=True, needs="element")
def plain_steps(grad: torch.Tensor, param: torch.Tensor, *, lr: float) -> torch.Tensor:
    return param - lr * grad


@pytest.mark.parametrize("step", [None, 7])
def test_an_optimizer_that_keeps_no_count(tmp_path, step):
    """The count of the state, by which schedules go on, is that of the directory where it has one."""
    model = nn.Linear(2, 1, bias=False)
    opt = zf.attach(model, plain_steps(lr=0.1))
    folder = tmp_path / "zero" / "weight"
    folder.mkdir(parents=True)
    torch.save({"param": torch.ones(1, 2)}, folder / "fp32.pt")
    if step is not None:
        torch.save(torch.tensor(float(step)), folder / "step.pt")
    state = zf.load_deepspeed(tmp_path, like=opt)
    assert torch.equal(model.weight, torch.ones(1, 2)) and int(state.step) == (step or 0)


def test_a_file_without_its_tensor_is_named(tmp_path):
    model = net()
    opt = adamw(model)
    train(model, opt, 0, 1)
    written(str(tmp_path), model, opt)
    torch.save({"other": torch.ones(5)}, tmp_path / "zero" / "0.bias" / "exp_avg.pt")
    with pytest.raises(ValueError, match=r"0.bias: exp_avg.pt is a NoneType instead of \(5,\)"):
        zf.load_deepspeed(tmp_path, like=zf.attach(net(7), zf.adamw(RATE)))


class Scaler:
    """As DeepSpeed's own classes in its files: nothing that torch would load."""

    def __init__(self):
        self.scale = 1.0


def beside(directory: Path, groups: list[list[str]], counts: list[Any], in_groups: bool = False, **more: Any) -> None:
    """The files that DeepSpeed's converter writes beside the parameters, as at stage 3."""
    kept = {i: {} if in_groups else {"step": x} for i, x in enumerate(counts)}
    settings = [{"lr": 0.1, **({"step": x} if in_groups else {})} for x in counts]
    saved = {"loss_scaler": Scaler(), "optimizer_state_dict": {"state": kept}, "param_groups": settings}
    torch.save(saved, directory / "zero" / "optimizer_state.pt")
    shapes = [{name: torch.Size([1]) for name in names} for names in groups]
    model = {"param_shapes": shapes, "global_steps": 9, "skipped_steps": 2, "module": {}, "args": Scaler(), **more}
    torch.save(model, directory / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def without_steps(directory: Path) -> tuple[nn.Module, Any]:
    """A model, attached, and a directory of it as stage 3 leaves it."""
    straight, model = net(), net(7)
    optimizer = adamw(straight)
    train(straight, optimizer, 0, 3)
    written(str(directory), straight, optimizer, flat=True)
    for file in directory.glob("zero/*/step.pt"):
        file.unlink()
    for each in (straight, model):
        each[3].requires_grad_(True)
        each[3] = nn.Identity()
    return model, zf.attach(model, zf.adamw(RATE))


NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
# By name: the groups, their counts, whether these are settings, and by leaf what is counted on.
STEPS: dict[str, tuple[list[list[str]], list[Any], bool, list[int]]] = {
    "one group": ([NAMES], [torch.tensor(3.0)], False, [3, 3, 3, 3]),
    "groups alike": ([NAMES[:1], NAMES[1:]], [4, 4], False, [4, 4, 4, 4]),
    "groups that differ": ([NAMES[:1], NAMES[1:]], [5, 6], False, [5, 6, 6, 6]),
    "among the settings": ([NAMES], [8], True, [8, 8, 8, 8]),
    "of the run alone": ([NAMES], [], False, [7, 7, 7, 7]),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_count_of_updates_where_parameters_have_none(tmp_path, name):
    groups, counts, in_groups, want = STEPS[name]
    model, opt = without_steps(tmp_path)
    beside(tmp_path, groups, counts, in_groups)
    state = zf.load_deepspeed(tmp_path, like=opt)
    found = get_optimizer_state_dict(model, opt, options=FULL)["state"]
    assert [int(found[leaf]["step"]) for leaf in NAMES] == want
    # Schedules go on by the updates of the run, 9 of which 2 were skipped.
    assert int(state.step) == 7
    state = zf.load_deepspeed(tmp_path, like=opt, step=11)
    found = get_optimizer_state_dict(model, opt, options=FULL)["state"]
    assert [int(found[leaf]["step"]) for leaf in NAMES] == [11] * 4 and int(state.step) == 11


def test_a_count_that_nobody_says_is_asked_for(tmp_path):
    _, opt = without_steps(tmp_path)
    with pytest.raises(ValueError, match=r"0.weight: neither step.pt nor .*like=opt, step=...\)"):
        zf.load_deepspeed(tmp_path, like=opt)
    assert int(zf.load_deepspeed(tmp_path, like=opt, step=3).step) == 3
    for step in (-1, 2.5, True, "3"):
        with pytest.raises(ValueError, match="step is a number of updates"):
            zf.load_deepspeed(tmp_path, like=opt, step=step)  # type: ignore[arg-type]


class Tied(nn.Module):
    """A tied weight, a frozen layer and buffers."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.out = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("shift", torch.randn(2, 2))
        self.register_buffer("seen", torch.tensor(seed))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("first", "second"), [("embed.weight", "out.weight"), ("out.weight", "embed.weight")])
def test_frozen_parameters_buffers_and_second_names(tmp_path, first, second, stage):
    old, new = Tied(4), Tied(5)
    moments = {name: torch.full((3, 2), i + 1.0) for i, name in enumerate(("exp_avg", "exp_avg_sq"))}
    weight = old.embed.weight.detach()
    for file, x in {"fp32": weight, **moments}.items():
        folder = tmp_path / "zero" / first
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"param": x} if stage < 3 else x.reshape(-1), folder / f"{file}.pt")
    given = {"global_steps": 3, "skipped_steps": 0, "param_shapes": [{first: torch.Size([3, 2])}]}
    if stage < 3:
        for name, x in old.state_dict().items():
            folder = tmp_path / "zero" / name
            folder.mkdir(exist_ok=True)
            # The second name has what the model computes in.
            if name != first:
                torch.save({"param": x.bfloat16().float() if name == second else x.float()}, folder / "fp32.pt")
        torch.save(given | {"module": old.state_dict()}, tmp_path / "mp_rank_00_model_states.pt")
    else:
        frozen = {f"frozen.{k}": x for k, x in old.frozen.state_dict().items()}
        given |= {"frozen_param_shapes": {k: x.shape for k, x in frozen.items()}, "buffer_names": ["shift", "seen"]}
        empty = {k: x if k in ("shift", "seen") else torch.empty(0) for k, x in old.state_dict().items()}
        for rank in (0, 1):
            # Two ranks: nine numbers are five and four, and the last part is padded.
            parts = {k: torch.cat([x.reshape(-1), torch.full((1,), 9.0)]).chunk(2)[rank] for k, x in frozen.items()}
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save(given | {"module": empty, "frozen_param_fragments": parts}, tmp_path / name)
    opt = zf.attach(new, zf.adamw(RATE))
    state = zf.load_deepspeed(tmp_path, like=opt)
    assert [k for k, x in old.state_dict().items() if not torch.equal(x, new.state_dict()[k])] == []
    found = get_optimizer_state_dict(new, opt, options=FULL)["state"]["embed.weight"]
    assert all(torch.equal(found[k], x) for k, x in moments.items()) and int(found["step"]) == int(state.step) == 3
    wrong = nn.Module()
    wrong.embed = nn.Embedding(3, 2)
    wrong.frozen = nn.Linear(2, 3).requires_grad_(False)
    wrong.register_buffer("shift", torch.zeros(3))
    with pytest.raises(ValueError) as error:
        zf.load_deepspeed(tmp_path, like=zf.attach(wrong, zf.adamw(RATE)))
    assert "frozen.weight: fp32.pt is of shape (3, 3) instead of (3, 2)" in str(error.value)
    assert "shift: is a buffer of shape (2, 2) instead of (3,)" in str(error.value)
    for name in ("out.weight", "seen"):
        told = f"{name}: is in the checkpoint and not in the model" in str(error.value)
        assert told == (stage < 3 or name == first)


def test_a_checkpoint_of_stage_0_is_taken_as_it_is(tmp_path):
    straight = net()
    optimizer = adamw(straight)
    train(straight, optimizer, 0, 3)
    saved = {"module": straight.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 3}
    torch.save(saved | {"loss_scaler": Scaler()}, tmp_path / "mp_rank_00_model_states.pt")
    model = net(7)
    opt = zf.attach(model, zf.adamw(RATE, weight_decay=DECAY))
    assert int(zf.load_deepspeed(tmp_path, like=opt).step) == 3
    for each, stepped in ((straight, optimizer), (model, opt)):
        train(each, stepped, 3, 5)
    for one, other in zip(straight.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    state = optimizer.state_dict()
    first = state["param_groups"][0]
    state["param_groups"] = [first | {"params": [0]}, first | {"params": [1, 2, 3]}]
    torch.save(saved | {"optimizer": state}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match=r"its parameters have numbers, in groups of \[1, 3\], and here 4 are trained"):
        zf.load_deepspeed(tmp_path, like=opt)


def test_an_unconverted_checkpoint_is_told_the_command(tmp_path):
    (tmp_path / "latest").write_text("global_step3")
    (tmp_path / "global_step3").mkdir()
    opt = zf.attach(net(), zf.adamw(RATE))
    for directory in (tmp_path, tmp_path / "global_step3"):
        with pytest.raises(FileNotFoundError) as error:
            zf.load_deepspeed(directory, like=opt)
        command = "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state"
        source = tmp_path / "global_step3"
        assert f"{command} --input_folder {source} --output_folder {source}_universal" in str(error.value)
