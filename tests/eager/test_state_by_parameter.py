"""`opt.state` as a mapping from parameter to what transforms keep of it, for those that know `torch.optim`."""

from __future__ import annotations

from typing import Any

import pytest
import rank_programs as P
import torch
import torch.distributed as dist
from stages import FIRST
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf


def trained(tx: zf.Transform) -> tuple[nn.Module, zf.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = zf.attach(model, tx)
    model(torch.ones(2, 3) * (1 + P.rank_and_size()[0])).square().mean().backward()
    opt.step()
    opt.zero_grad()
    return model, opt


def test_it_has_what_torch_optim_has():
    model, opt = trained(zf.adamw(1e-2))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    reference = torch.optim.AdamW(plain.parameters(), 1e-2, fused=True)
    plain(torch.ones(2, 3)).square().mean().backward()
    reference.step()
    assert list(opt.state) == list(model.parameters()) and len(opt.state) == 4 and bool(opt.state)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p in opt.state and q not in opt.state
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(opt.state[p][name], reference.state[q][name], rtol=1e-6, atol=0)
    assert [set(kept) for kept in opt.state.values()] == [set(reference.state[q]) for q in plain.parameters()]
    # The name of versions before the form was torch's.
    assert all(kept["count"] is kept["step"] for kept in opt.state.values())


def test_what_is_assigned_is_written_into_the_state():
    _, opt = trained(zf.adamw(1e-2))
    for p, kept in opt.state.items():
        kept["exp_avg"] = torch.full_like(kept["exp_avg"], 2.0)
        opt.state[p] = {name: x + 1 for name, x in kept.items()}
    of = opt.state.transforms["adamw"]
    assert all(torch.equal(x, torch.full_like(x, 3.0)) for x in of["exp_avg"].values())
    assert all(int(x) == 2 for x in of["count"].values())


def test_one_name_in_several_transforms_has_them_in_front():
    model, opt = trained(zf.chain(zf.adamw(1e-2), zf.ema(0.9)))
    assert set(opt.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq", "average"}
    model, opt = trained(zf.chain(zf.adamw(1e-2), zf.ema(0.9), zf.chain(zf.ema(0.5))))
    names = {name: x for name, x in opt.state[model[0].weight].items() if "average" in name}
    assert len(names) == 2 and all(name.endswith(".average") for name in names), names
    assert not torch.equal(*names.values())


@pytest.mark.parametrize(
    "give, words",
    [
        (lambda kept: {**kept, "exp_avg": torch.zeros(7)}, "shape"),
        (lambda kept: {"exp_avg": kept["exp_avg"]}, "exp_avg_sq"),
        (lambda kept: {**kept, "momentum": torch.zeros(1)}, "exp_avg_sq"),
        (lambda kept: 3, "an int"),
    ],
)
def test_other_names_and_shapes_are_refused_and_change_nothing(give, words):
    model, opt = trained(zf.adamw(1e-2))
    p = model[0].weight
    before = {name: x.clone() for name, x in opt.state[p].items()}
    with pytest.raises(ValueError, match=words):
        opt.state[p] = give({name: x + 1 for name, x in opt.state[p].items()})
    assert all(torch.equal(x, before[name]) for name, x in opt.state[p].items())
    with pytest.raises(TypeError, match="zero_"):
        del opt.state[p]["exp_avg"]


def _keyed_by_the_model(stage: str) -> list[tuple[int, ...]]:
    model, opt = trained(zf.chain(FIRST[stage](), zf.adamw(1e-2)))
    for p in model.parameters():
        opt.state[p]["exp_avg"] = torch.zeros_like(opt.state[p]["exp_avg"])
    assert not any(x.any() for x in opt.state.transforms["adamw"]["exp_avg"].values())
    return [tuple(opt.state[p]["exp_avg"].shape) for p in model.parameters()]


@pytest.mark.parametrize("stage", ["reduce_scatter", "shard"])
def test_on_ranks_its_keys_are_the_parameters_of_the_model(stage):
    # 12, 4, 8 and 2 elements over two ranks.
    shapes = [(4, 3), (4,), (2, 4), (2,)]
    assert zf.launch(_keyed_by_the_model, 2, stage, timeout=limit()) == [shapes] * 2


def _beside_gradients(stage: str) -> list[Any]:
    """What is computed with an optimizer's state and gradients, what is written into it, and a step behind that."""
    first = [zf.shard()] if stage == "zero3" else []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    inner = zf.partition({"a": zf.adamw(1e-2), "b": zf.muon(1e-2)}, lambda path: "b" if path == "0.weight" else "a")
    opt = zf.attach(model, zf.chain(*first, inner, zf.ema(0.5)))
    found: list[Any] = []
    for step in range(3):
        model(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3) + step).square().mean().backward()
        if step:
            for p in list(model.parameters())[1:]:
                kept = opt.state[p]
                ratio = p.grad / (kept["exp_avg_sq"].sqrt() + 1e-3)
                found += [ratio.norm().item(), (kept["average"] - p).abs().max().item(), kept["exp_avg"].tolist()]
                kept["exp_avg"].mul_(0.5)
                opt.state[p]["exp_avg_sq"] = torch.full(p.shape, 0.25, dtype=torch.float64)
                opt.state[p] = {name: x + 1 if name == "average" else x for name, x in opt.state[p].items()}
        opt.step()
        opt.zero_grad()
    shapes = [
        sorted((n, tuple(x.shape)) for n, x in opt.state[p].items() if n == "exp_avg") for p in model.parameters()
    ]
    averages = [x.tolist() for x in zf.full_params(opt.tx, opt.state, "ema").values()]
    with pytest.raises(ValueError, match="shape"):
        opt.state[model[1].weight]["exp_avg"] = torch.zeros(2, dtype=torch.float64)
    opt.detach()
    return [found, averages, [p.tolist() for p in model.parameters()], str(shapes)]


def test_under_shard_states_have_the_shapes_of_parameters():
    want = _beside_gradients("zero0")
    for ranks in (2, 3):
        for found in zf.launch(_beside_gradients, ranks, "zero3", timeout=limit()):
            assert found[-1] == want[-1]
            # float64, sums over ranks in another order; Muon's iteration is in bfloat16.
            torch.testing.assert_close(found[:-1], want[:-1], rtol=1e-9, atol=1e-12)


class Frozen(nn.Module):
    """A layer whose weight is of integers, as quantizers keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12, dtype=torch.int8).reshape(4, 3), requires_grad=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.weight.to(x.dtype).T)


def _frozen_integers(folder: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Frozen()
    tx = zf.chain(zf.shard(), zf.adamw(1e-2)) if dist.is_initialized() else zf.adamw(1e-2)
    opt = zf.attach(model, tx)
    for i in range(3):
        model(torch.ones(2, 3)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if i == 1:
            zf.save(folder, opt)
            model.weight.zero_()
            opt.load_state(zf.load(folder, like=opt))
    opt.detach()
    return [p.detach().clone() for p in model.parameters()]


def test_frozen_integers_stay_whole_and_are_saved_with_the_buffers(tmp_path):
    expected = _frozen_integers(str(tmp_path / "one"))
    assert torch.equal(expected[0], Frozen().weight) and expected[0].dtype == torch.int8
    for mine in zf.launch(_frozen_integers, 2, str(tmp_path / "two"), timeout=limit()):
        # Equal batches on both ranks: their mean is each of them, to the bit.
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_a_group_may_have_the_name_of_a_parameter():
    tx = zf.partition({"w": zf.adamw(1e-3), "b": zf.sgd(0.1, momentum=0.9)}, {"w": "w", "b": "b"})
    state = zf.init(tx, {"w": torch.zeros(2), "b": torch.zeros(2)})
    assert set(state[state.leaves["w"]]) == {"count", "exp_avg", "exp_avg_sq"}
    assert set(state[state.leaves["b"]]) == {"count", "momentum"}
