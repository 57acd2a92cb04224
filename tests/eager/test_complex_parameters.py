"""Complex parameters are trained, clipped, saved and shown as torch.optim has them, at every stage, by both routes."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import covering
from one_launch import one_launch
from stages import around
from torch import Tensor, nn

import zerofn as zf

C64, C128 = torch.complex64, torch.complex128
STEPS = 3


class Fourier(nn.Module):
    """A layer of a neural operator, real leaves of an odd size beside it, a complex number and a tied matrix."""

    def __init__(self, dtype: torch.dtype = C128):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        draw = lambda *shape, dtype=dtype: nn.Parameter(torch.randn(shape, generator=made, dtype=dtype) * 0.5)  # noqa: E731
        real = dtype.to_real()
        self.bias = draw(3, dtype=real)
        self.modes = draw(3, 3, 4)
        self.turn = draw()
        self.blocks = nn.ModuleList([Turned(draw(3), draw(1, 5, dtype=real)) for _ in range(2)])
        self.late = nn.Parameter(draw(3, 2).detach().T)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bik,iok->bok", torch.fft.rfft(x.to(self.bias.dtype)).to(self.modes.dtype), self.modes)
        h = torch.fft.irfft(modes * self.turn.conj(), n=6) + self.bias[:, None]
        for block in self.blocks:
            h = block(h)
        return (h.to(self.late.dtype).transpose(1, 2) @ self.late.T).abs().square()


class Turned(nn.Module):
    def __init__(self, phase: nn.Parameter, gain: nn.Parameter):
        super().__init__()
        self.phase, self.gain = phase, gain

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x * self.phase[:, None]).real * self.gain.sum() + self.phase.imag[:, None])


def batch(step: int, rank: int, ranks: int, dtype: torch.dtype = C128) -> Tensor:
    made = torch.Generator().manual_seed(step)
    return torch.randn(6, 3, 6, generator=made, dtype=dtype.to_real()).chunk(ranks)[rank]


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def loss_of(y: Tensor) -> Tensor:
    return y.mean() + y[..., 0].square().mean()


ADAMW = dict(lr=3e-2, weight_decay=0.1)
OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "adamw": (lambda: zf.adamw(**ADAMW), lambda ps: torch.optim.AdamW(ps, **ADAMW)),
    "sgd": (lambda: zf.sgd(0.05, momentum=0.9), lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9)),
    "rmsprop": (lambda: zf.rmsprop(1e-2), lambda ps: torch.optim.RMSprop(ps, 1e-2)),
    "adam": (lambda: zf.adam(1e-2), lambda ps: torch.optim.Adam(ps, 1e-2)),
    "from_torch": (lambda: zf.from_torch(torch.optim.Adagrad, lr=0.1), lambda ps: torch.optim.Adagrad(ps, lr=0.1)),
}
STAGES = ("one process", "data parallel", "data parallel, late", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def tx_of(stage: str, optimizer: str, window: int = 1, clip: float = math.inf) -> Any:
    held = zf.accumulate(window)
    middle = [] if "late" in stage or stage == "ZeRO-1" else [held]
    clipped = [zf.clip_by_global_norm(clip)] if clip < math.inf else []
    return zf.chain(*around(stage, *middle, window=held), *clipped, OPTIMIZERS[optimizer][0]())


def by_torch(optimizer: str, window: int, clip: float, dtype: torch.dtype, steps: int = STEPS) -> tuple[Any, Any]:
    """What torch gives on one process: the model and the optimizer."""
    model = Fourier(dtype)
    o = OPTIMIZERS[optimizer][1](model.parameters())
    for step in range(steps):
        for k in range(window):
            (loss_of(model(batch(step * window + k, 0, 1, dtype))) / window).backward()
        for p in model.parameters():
            # torch's clipping and its optimizers refuse a lazy conjugate, as backward gives `turn`.
            p.grad = p.grad.resolve_conj()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        o.step()
        o.zero_grad()
    return model, o


def close(found: Tensor, expected: Tensor, first: Tensor) -> None:
    """The change is that of torch."""
    tight = found.dtype in (C128, torch.float64)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    how = dict(rtol=1e-9, atol=1e-12) if tight else dict(rtol=2e-4, atol=2e-6)
    torch.testing.assert_close(found - first, expected - first, **how)


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def attached(stage: str, optimizer: str, window: int, clip: float, dtype: torch.dtype) -> None:
    rank, ranks = place()
    model = Fourier(dtype)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = zf.attach(model, tx_of(stage, optimizer, window, clip))
    for step in range(STEPS * window):
        loss_of(model(batch(step, rank, ranks, dtype))).backward()
        opt.step()
        opt.zero_grad()
    other, o = by_torch(optimizer, window, clip, dtype)
    expected = dict(other.named_parameters())
    assert all(p.dtype == expected[name].dtype for name, p in model.named_parameters())
    for name, x in model.state_dict().items():
        close(whole(x), expected[name].detach(), first[name])
    with opt.gathered():
        for name, p in model.named_parameters():
            close(whole(p), expected[name].detach(), first[name])
    for name, p in model.named_parameters():
        kept = o.state[expected[name]]
        for slot, x in opt.state[p].items():
            if slot in kept and isinstance(kept[slot], Tensor) and kept[slot].ndim:
                close(whole(x), kept[slot], torch.zeros_like(kept[slot]))
    opt.detach()
    for name, p in model.named_parameters():
        close(p.detach(), expected[name].detach(), first[name])


def pure(stage: str, optimizer: str, window: int, clip: float, dtype: torch.dtype) -> None:
    rank, ranks = place()
    model = Fourier(dtype)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    tx = tx_of(stage, optimizer, window, clip)
    expected = dict(by_torch(optimizer, window, clip, dtype)[0].named_parameters())
    of = lambda params, x: loss_of(torch.func.functional_call(model, params, (x,)))  # noqa: E731
    step, bound = zf.make_step(of, tx), stage not in ("data parallel, late", "ZeRO-1")
    states = [zf.init(tx, first) for _ in range(3)]
    for i in range(STEPS * window):
        x = batch(i, rank, ranks, dtype)
        states[0], _ = step(states[0], x)
        loss, pullback = zf.vjp(of, tx, states[1], x)
        states[1], _ = zf.update(tx, pullback(torch.ones_like(loss))[0], states[1])
        if bound:
            grads = torch.func.grad(zf.bind(of, tx, states[2]))(states[2].params, x)
            states[2], _ = zf.update(tx, grads, states[2])
    for state in states if bound else states[:2]:
        assert all(x.dtype == first[name].dtype for name, x in state.params.items())
        for name, x in zf.full_params(tx, state).items():
            close(x, expected[name].detach(), first[name])


ROWS = [
    *[(way, stage, "adamw", 2, 0.5, C128) for way in (attached, pure) for stage in STAGES],
    *[(attached, stage, o, 1, math.inf, C128) for stage in STAGES for o in OPTIMIZERS if o != "adamw"],
    *[(pure, stage, "sgd", 1, math.inf, C128) for stage in STAGES],
    *[(way, stage, "adamw", 1, math.inf, C64) for way in (attached, pure) for stage in STAGES],
]


def run(way: Callable[..., None], *row: Any) -> None:
    way(*row)


# Slowly each two of what a row has.
@pytest.mark.parametrize(
    ("ranks", "few"), [(1, True), (2, True), (3, True), pytest.param(3, False, marks=pytest.mark.slow)]
)
def test_every_stage_trains_complex_parameters_as_torch_does(ranks, few):
    rows = [row for row in ROWS if ranks == 1 or row[1] != "one process"]
    if few:
        # Each stage by both routes on two ranks, each optimizer, and each dtype by both routes.
        ways = lambda row: ((row[0], row[1] if ranks == 2 else None), row[2], (row[0], row[5]))  # noqa: E731
        rows = covering(rows, key=ways)
    else:
        rows = covering(rows, 2)
    one_launch(ranks, run, rows, 300.0)


# ---- what is done with a complex model beside training ----


def trained(opt: Any, steps: range, rank: int, ranks: int, model: nn.Module) -> None:
    for step in steps:
        loss_of(model(batch(step, rank, ranks))).backward()
        opt.step()
        opt.zero_grad()


def weights(opt: Any, model: nn.Module) -> dict[str, Tensor]:
    with opt.gathered():
        return {name: whole(p) for name, p in model.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    first = dict(Fourier().named_parameters())
    for name, x in expected.items():
        close(found[name], x.detach(), first[name].detach())


def two_models(stage: str) -> tuple[Any, Any, Any, Any]:
    """A trained model with its optimizer, and another one, not trained."""
    rank, ranks = place()
    tx = tx_of(stage, "adamw")
    model, other = Fourier(), Fourier()
    opt = zf.attach(model, tx)
    trained(opt, range(2), rank, ranks, model)
    return model, opt, other, zf.attach(other, tx)


def goes_on(model: Any, opt: Any, other: Any, again: Any) -> None:
    rank, ranks = place()
    trained(opt, range(2, 4), rank, ranks, model)
    trained(again, range(2, 4), rank, ranks, other)
    same(weights(again, other), weights(opt, model))
    same(weights(again, other), dict(by_torch("adamw", 1, math.inf, C128, 4)[0].named_parameters()))


def state_dicts(stage: str) -> None:
    model, opt, other, again = two_models(stage)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    goes_on(model, opt, other, again)


def torchs_state_dict(stage: str) -> None:
    """The state of torch.optim on one process, in whole complex tensors."""
    rank, ranks = place()
    theirs, o = by_torch("adamw", 1, math.inf, C128, 2)
    model = Fourier()
    opt = zf.attach(model, tx_of(stage, "adamw"))
    model.load_state_dict(theirs.state_dict())
    opt.load_state_dict(o.state_dict())
    trained(opt, range(2, 4), rank, ranks, model)
    same(weights(opt, model), dict(by_torch("adamw", 1, math.inf, C128, 4)[0].named_parameters()))


def back_to_torch(stage: str) -> None:
    model, opt, *_ = two_models(stage)
    full = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x  # noqa: E731
    d = opt.state_dict()
    held = {i: {k: full(x) if isinstance(x, Tensor) else x for k, x in of.items()} for i, of in d["state"].items()}
    theirs = Fourier()
    theirs.load_state_dict(weights(opt, model))
    o = torch.optim.AdamW(theirs.parameters(), **ADAMW)
    o.load_state_dict({"state": held, "param_groups": d["param_groups"]})
    for step in range(2, 4):
        o.zero_grad()
        loss_of(theirs(batch(step, 0, 1))).backward()
        for p in theirs.parameters():
            p.grad = p.grad.resolve_conj()
        o.step()
    same(dict(theirs.named_parameters()), dict(by_torch("adamw", 1, math.inf, C128, 4)[0].named_parameters()))


def folder() -> str:
    names = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return names[0]


def checkpoints(stage: str) -> None:
    model, opt, other, again = two_models(stage)
    directory = folder()
    zf.save(directory, opt)
    zf.load(directory, like=again)
    goes_on(model, opt, other, again)


def exported(stage: str) -> None:
    """As the tensors of `model.state_dict()`; safetensors has complex64 alone."""
    rank, ranks = place()
    model, other = Fourier(C64), Fourier(C64)
    opt = zf.attach(model, tx_of(stage, "adamw"))
    loss_of(model(batch(0, rank, ranks, C64))).backward()
    opt.step()
    path = Path(folder()) / "model.safetensors"
    zf.export_safetensors(path, opt)
    from safetensors.torch import load_file

    found, mine = load_file(path), weights(opt, model)
    assert found.keys() == mine.keys()
    assert all(torch.equal(found[name], x) for name, x in mine.items())
    again = zf.attach(other, tx_of(stage, "adamw"))
    zf.load_safetensors(path, like=again)
    assert all(torch.equal(x, mine[name]) for name, x in weights(again, other).items())


def written_by_hand(stage: str) -> None:
    """Weights that are written after attach are trained, and read back."""
    rank, ranks = place()
    theirs, model = Fourier(), Fourier()
    opt = zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), zf.sgd(0.1)))
    o = torch.optim.SGD(theirs.parameters(), 0.1)
    for m in (theirs, model):
        with torch.no_grad():
            m.modes.mul_(1j)
            m.blocks[0].phase.data.add_(1 - 1j)
    for p in (theirs.modes, theirs.turn):
        p.register_hook(lambda g: 2 * g)
    for p in (model.modes, model.turn):
        p.register_hook(lambda g: 2 * g)
    loss_of(theirs(batch(0, 0, 1))).backward()
    for p in theirs.parameters():
        p.grad = p.grad.resolve_conj()
    o.step()
    loss_of(model(batch(0, rank, ranks))).backward()
    opt.step()
    same(weights(opt, model), dict(theirs.named_parameters()))
    opt.detach()
    same(dict(model.named_parameters()), dict(theirs.named_parameters()))


def scaled_and_in_bf16(stage: str) -> None:
    """A loss scale leaves the numbers, and `precision` does not cast complex parameters."""
    rank, ranks = place()
    model = Fourier()
    middle = (zf.precision(grad_dtype=torch.float64, param_dtype=torch.float32), zf.scale_loss(2.0**10))
    opt = zf.attach(model, zf.chain(*around(stage, *middle, window=zf.accumulate(1)), zf.sgd(0.05, momentum=0.9)))
    assert model.modes.dtype == C128
    trained(opt, range(STEPS), rank, ranks, model)
    expected, first = dict(by_torch("sgd", 1, math.inf, C128)[0].named_parameters()), dict(Fourier().named_parameters())
    for name, x in weights(opt, model).items():
        # A copy of a real parameter may be in the compute dtype.
        assert x.dtype == C128 or not expected[name].is_complex()
        torch.testing.assert_close(x - first[name], expected[name] - first[name], rtol=1e-4, atol=3e-6)


def frozen(stage: str) -> None:
    rank, ranks = place()
    theirs, model = Fourier(), Fourier()
    for m in (theirs, model):
        m.modes.requires_grad_(False)
    opt = zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), zf.sgd(0.1)), hold_frozen=True)
    o = torch.optim.SGD(theirs.parameters(), 0.1)
    for step, (modes, turn) in enumerate([(False, True), (True, False), (True, True)]):
        for m in (theirs, model):
            m.modes.requires_grad_(modes)
            m.turn.requires_grad_(turn)
        loss_of(theirs(batch(step, 0, 1))).backward()
        for p in theirs.parameters():
            p.grad = None if p.grad is None else p.grad.resolve_conj()
        o.step()
        o.zero_grad()
        trained(opt, range(step, step + 1), rank, ranks, model)
    same(weights(opt, model), dict(theirs.named_parameters()))


def in_backward(stage: str) -> None:
    rank, ranks = place()
    model = Fourier()
    opt = zf.attach(model, tx_of(stage, "adamw"), in_backward=True)
    trained(opt, range(STEPS), rank, ranks, model)
    same(weights(opt, model), dict(by_torch("adamw", 1, math.inf, C128)[0].named_parameters()))


def clipped_by_torch(stage: str) -> None:
    """`clip_grad_norm_` of the model's own gradients, where these stay in `p.grad`."""
    rank, ranks = place()
    model = Fourier()
    opt = zf.attach(model, tx_of(stage, "adamw"))
    norms = []
    for step in range(STEPS):
        loss_of(model(batch(step, rank, ranks))).backward()
        norms.append(whole(torch.nn.utils.clip_grad_norm_([*model.parameters()][1:2], 1e-3)))
        opt.step()
        opt.zero_grad()
    theirs = Fourier()
    o = torch.optim.AdamW(theirs.parameters(), **ADAMW)
    for step in range(STEPS):
        loss_of(theirs(batch(step, 0, 1))).backward()
        for p in theirs.parameters():
            p.grad = p.grad.resolve_conj()
        torch.testing.assert_close(torch.nn.utils.clip_grad_norm_([theirs.modes], 1e-3), norms[step])
        o.step()
        o.zero_grad()
    same(weights(opt, model), dict(theirs.named_parameters()))


def averages(stage: str) -> None:
    """Averages are shown as complex tensors, and put in the place of the parameters."""
    rank, ranks = place()
    model = Fourier()
    tx = zf.chain(*around(stage, window=zf.accumulate(1)), zf.sgd(0.1), zf.ema(0.5))
    opt = zf.attach(model, tx)
    trained(opt, range(1), rank, ranks, model)
    mine, first = weights(opt, model), dict(Fourier().named_parameters())
    with opt.averaged():
        found = weights(opt, model)
    kept = zf.full_params(tx, opt.state, of="ema")
    for name, x in found.items():
        assert x.dtype == first[name].dtype and torch.equal(kept[name], x)
        assert not torch.equal(x, mine[name])


def a_copy(stage: str) -> None:
    model, opt, *_ = two_models(stage)
    with opt.gathered():
        twin = copy.deepcopy(model)
    same(dict(twin.named_parameters()), weights(opt, model))
    assert all(p.is_complex() == q.is_complex() for p, q in zip(twin.parameters(), model.parameters(), strict=True))


def torchs_functions_for_state_dicts(stage: str) -> None:
    """`get_model_state_dict` and `get_optimizer_state_dict`, whole and as DTensors, and the ways back."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    for whole_ones in (True, False):
        model, opt, other, again = two_models(stage)
        options = StateDictOptions(full_state_dict=whole_ones)
        of_model, of_opt = get_state_dict(model, opt, options=options)
        assert of_model["modes"].dtype == of_opt["state"]["modes"]["exp_avg"].dtype == C128
        set_state_dict(other, again, model_state_dict=of_model, optim_state_dict=of_opt, options=options)
        goes_on(model, opt, other, again)


def compiled(stage: str) -> None:
    rank, ranks = place()
    model = Fourier()
    opt = zf.attach(model, tx_of(stage, "adamw"))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(STEPS):
        loss_of(run(batch(step, rank, ranks))).backward()
        opt.step()
        opt.zero_grad()
    same(weights(opt, model), dict(by_torch("adamw", 1, math.inf, C128)[0].named_parameters()))


def called_with_other_parameters(stage: str) -> None:
    model = Fourier()
    zf.attach(model, tx_of(stage, "adamw"))
    others = {name: p.detach() * 2 for name, p in Fourier().named_parameters()}
    x = batch(0, 0, 1)
    expected = torch.func.functional_call(Fourier(), others, (x,))
    torch.testing.assert_close(torch.func.functional_call(model, others, (x,)), expected)


def ones_own_view(stage: str) -> None:
    """A view of one's own sees the parts."""
    rank, ranks = place()
    twice = zf.extend.View(lambda x, leaf: 2 * x, lambda g, leaf: 2 * g, lambda x, leaf: x / 2)
    doubled = zf.extend.Transform(
        "doubled", needs="element", view_fn=lambda layout, ranks: twice, through=zf.extend.as_it_is
    )
    model = Fourier()
    opt = zf.attach(model, zf.chain(*around(stage, doubled, window=zf.accumulate(1)), zf.sgd(0.01)))
    trained(opt, range(1), rank, ranks, model)
    theirs = Fourier()
    loss_of(theirs(batch(0, 0, 1))).backward()
    with torch.no_grad():
        for p in theirs.parameters():
            p -= 0.04 * p.grad
    same(weights(opt, model), dict(theirs.named_parameters()))


PROGRAMS = (
    state_dicts,
    torchs_state_dict,
    back_to_torch,
    checkpoints,
    exported,
    written_by_hand,
    scaled_and_in_bf16,
    frozen,
    in_backward,
    clipped_by_torch,
    averages,
    a_copy,
    torchs_functions_for_state_dicts,
    compiled,
    called_with_other_parameters,
    ones_own_view,
)
# Behind a window that is reduced late, an update cannot run in backward, nor is `p.grad` the mean over ranks.
NOT = {
    (in_backward, "data parallel, late"),
    (in_backward, "ZeRO-1"),
    # Which is refused, below.
    (ones_own_view, "ZeRO-3"),
    (compiled, "ZeRO-3"),
    *[(clipped_by_torch, stage) for stage in STAGES if stage not in ("one process", "ZeRO-3")],
}
OTHERS = [(program, stage) for program in PROGRAMS for stage in STAGES if (program, stage) not in NOT]


@pytest.mark.parametrize(("ranks", "few"), [(1, True), (2, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_programs_do_with_complex_parameters_what_they_do_with_others(ranks, few):
    rows = [row for row in OTHERS if ranks == 1 or row[1] != "one process"]
    one_launch(ranks, run, covering(rows, 1 if few else 2), 300.0)


# ---- what is refused ----


@pytest.mark.parametrize("make", [lambda: zf.muon(1e-2), lambda: zf.adafactor(1e-2), lambda: zf.shampoo(1e-2)])
def test_optimizers_of_whole_leaves_name_every_complex_leaf(make):
    t = make()
    for run in (lambda: zf.attach(Fourier(), t), lambda: zf.init(t, dict(Fourier().named_parameters()))):
        with pytest.raises(ValueError, match=rf"modes: torch.complex128, and {t.name} needs whole leaves.*") as e:
            run()
        assert "turn" in str(e.value) and "gain" not in str(e.value) and "zf.partition" in str(e.value)
    labels = lambda path: "rest" if "gain" in path else "complex"  # noqa: E731
    model = Fourier()
    opt = zf.attach(model, zf.partition({"complex": zf.adamw(1e-2), "rest": t}, labels))
    loss_of(model(batch(0, 0, 1))).backward()
    opt.step()


def test_rows_of_complex_leaves_are_refused():
    with pytest.raises(ValueError, match=r"modes: torch.complex128, and centralize needs whole rows"):
        zf.attach(Fourier(), zf.chain(zf.centralize(), zf.adamw(1e-2)))


def test_lamb_takes_norms_of_complex_leaves():
    """Its ratios are norms, which those of pairs of numbers are; its elements are those of Adam."""
    p = {"w": torch.randn(4, 3, dtype=C128)}
    pairs = {"w": torch.view_as_real(p["w"])}
    ours, of_pairs = zf.init(zf.lamb(0.1), p), zf.init(zf.lamb(0.1), pairs)
    loss = lambda q: (q["w"] * p["w"].conj() - 1).abs().square().sum()  # noqa: E731
    ours, _ = zf.make_step(loss, zf.lamb(0.1))(ours)
    of_pairs, _ = zf.make_step(lambda q: loss({"w": torch.view_as_complex(q["w"])}), zf.lamb(0.1))(of_pairs)
    assert torch.equal(torch.view_as_real(ours.params["w"]), of_pairs.params["w"])


def test_models_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=C64))})
    with pytest.raises(ValueError, match=r"zf.materialize: complex parameters\n  w: torch.complex64"):
        zf.materialize(model, zf.sgd(0.1), lambda path, x: x.zero_())


def test_init_of_meta_tensors_gets_complex_ones():
    def fill(path: str, x: Tensor) -> None:
        assert x.dtype == C64 and x.shape == (2, 3)
        x.copy_(torch.full((2, 3), 1 + 2j))

    meta = {"w": torch.empty(2, 3, dtype=C64, device="meta")}
    state = zf.init(zf.adamw(0.1), meta, init=fill, device="cpu")
    assert torch.equal(state.params["w"], torch.full((2, 3), 1 + 2j))
    assert zf.plan(zf.adamw(0.1), meta, world_size=1).by_transform["params"] == 2 * 3 * 8


def test_safetensors_has_no_complex128(tmp_path):
    with pytest.raises(ValueError, match=r"modes: torch.complex128"):
        zf.export_safetensors(tmp_path / "a", zf.init(zf.sgd(0.1), dict(Fourier().named_parameters())))


def cut_otherwise() -> None:
    with pytest.raises(ValueError, match="complex parameters under shard, with a view or a wire of one's own"):
        ones_own_view("ZeRO-3")


def compiled_shards() -> None:
    model = Fourier()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(1e-2)))
    with pytest.raises(RuntimeError, match=r"fullgraph=True. of complex parameters under shard"):
        torch.compile(model, backend="eager", fullgraph=True)(batch(0, 0, 1))
    opt.detach()


def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ValueError, match=r"attach of a model of fully_shard: complex parameters"):
        zf.attach(
            fully_shard(Turned(*(nn.Parameter(torch.ones(2, dtype=d)) for d in (C64, torch.float32)))), zf.sgd(0.1)
        )


def before_it_was_attached() -> None:
    model = Fourier()
    p = model.modes
    opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(1e-2)))
    with pytest.raises(RuntimeError, match=r"of the parameter modes from before zf.attach"):
        p + 1
    opt.detach()
    assert model.modes is p and torch.equal(p, Fourier().modes)


def test_what_two_ranks_refuse():
    one_launch(2, run, [(cut_otherwise,), (compiled_shards,), (fully_sharded,), (before_it_was_attached,)])


def saved(directory: str) -> None:
    model = Fourier()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(**ADAMW)))
    trained(opt, range(2), *place(), model)
    zf.save(directory, opt)


def test_a_checkpoint_of_two_ranks_goes_on_one(tmp_path):
    zf.launch(saved, 2, str(tmp_path))
    model = Fourier()
    opt = zf.attach(model, zf.adamw(**ADAMW))
    zf.load(tmp_path, like=opt)
    trained(opt, range(2, 4), 0, 1, model)
    same(weights(opt, model), dict(by_torch("adamw", 1, math.inf, C128, 4)[0].named_parameters()))
