"""What may be attached, what may change afterwards, and what errors of an attached model's forward are told besides."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations

import zerofn as zf

BF16 = torch.bfloat16
SGD = zf.sgd(0.1)
PIPES: dict[str, Callable[[], zf.Transform]] = {
    "plain": lambda: SGD,
    "scaled": lambda: zf.chain(zf.scale_loss(64.0), SGD),
    "cast": lambda: zf.chain(zf.precision(param_dtype=BF16, output_dtype=torch.float32), SGD),
    "both": lambda: zf.chain(zf.precision(param_dtype=BF16), zf.scale_loss(64.0), SGD),
}
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def state_of(model: nn.Module) -> list[tuple[Tensor, torch.dtype, bool]]:
    return [(p.detach().clone(), p.dtype, hasattr(p, "_zerofn_owner")) for p in model.parameters()]


def same(a: list, b: list) -> bool:
    return all(torch.equal(x[0], y[0]) and x[1:] == y[1:] for x, y in zip(a, b, strict=True))


# -- what may be attached -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pipe", PIPES)
def test_a_model_with_nothing_to_train(pipe):
    model = net().requires_grad_(False)
    before = state_of(model)
    with pytest.raises(ValueError, match=r"no parameter requires a gradient \(4 are frozen: 0.weight, "):
        zf.attach(model, PIPES[pipe]())
    assert same(before, state_of(model)) and not any(m._forward_pre_hooks for m in model.modules())
    model[2].bias.requires_grad_(True)
    opt = zf.attach(model, PIPES[pipe]())
    model(X).sum().backward()
    opt.step()
    moved = [not torch.equal(x.to(p.dtype), p) for (x, *_), p in zip(before, model.parameters(), strict=True)]
    assert moved == [False, False, False, True]


LAZY = {
    "Linear": (lambda: nn.LazyLinear(3), ["0.weight", "0.bias"]),
    "Conv1d": (lambda: nn.LazyConv1d(2, 1), ["0.weight", "0.bias"]),
    "BatchNorm": (lambda: nn.LazyBatchNorm1d(), ["0.weight", "0.bias"]),
    "without bias": (lambda: nn.LazyLinear(3, bias=False), ["0.weight"]),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("kind", LAZY)
def test_lazy_modules(kind):
    make, paths = LAZY[kind]
    model = nn.Sequential(make(), nn.Linear(3, 3))
    for where, call in (("attach", zf.attach), ("plan", lambda m, tx: zf.plan(tx, m))):
        with pytest.raises(ValueError, match=rf"{where}: parameters are not initialised yet") as caught:
            call(model, SGD)
        rows = str(caught.value).splitlines()
        assert [r.strip() for r in rows[1:-1]] == [f"{p}: UninitializedParameter" for p in paths]
        assert rows[-1].startswith("  write: model(example) once") and f"zf.{where}(...)" in rows[-1]
    with pytest.raises(TypeError, match=r"0.weight: not initialised yet"):
        zf.init(SGD, dict(model.named_parameters()))
    if kind != "Conv1d":
        model(torch.randn(4, 3))
        opt = zf.attach(model, SGD)
        model(X).sum().backward()
        opt.step()
        assert opt.global_steps == 1


# -- what may change afterwards -----------------------------------------------------------------------------


class Adapter(nn.Module):
    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, self.a = base, nn.Parameter(torch.full((3, 3), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a


def adapt(model: nn.Module) -> None:
    model[0] = Adapter(model[0])


def adapt_and_freeze(model: nn.Module) -> None:
    model.requires_grad_(False)
    adapt(model)


def prompt(model: nn.Module) -> None:
    """A parameter of the model's own, used by a hook."""
    model[0].prompt = nn.Parameter(torch.ones(3))
    model[0].register_forward_hook(lambda module, args, out: out + module.prompt.to(out.dtype))


ADAPTERS = "attach after adding adapters"
CHANGES = {
    "adapter": (adapt, ["0: added, removed or replaced"], ADAPTERS),
    "frozen, adapter": (adapt_and_freeze, ["0: added, removed or replaced"], ADAPTERS),
    "prompt": (prompt, ["0.prompt: added, removed or replaced"], ADAPTERS),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pipe", PIPES)
def test_adapters_after_attach(pipe, change):
    """Wherever it is noticed first, in forward, in backward or at the step: what has changed, by path, and when to."""
    alter, paths, right = CHANGES[change]
    model = net()
    opt = zf.attach(model, PIPES[pipe]())
    alter(model)
    with pytest.raises(RuntimeError) as caught:
        model(X).sum().backward()
        opt.step()
    told = "".join(traceback.format_exception_only(caught.value))
    assert "the model changed after it was attached" in told and "from a list, or a closure" not in told
    assert all(f"  {path}" in told for path in paths)
    assert "opt.detach() before the change" in told and right in told
    # As it says.
    opt.detach()
    other = net()
    alter(other)
    # Under a scale a hook of the user's is outside, and so is what it adds.
    if pipe == "plain" or (pipe == "scaled" and change != "prompt"):
        opt = zf.attach(other, PIPES[pipe]())
        other(X).sum().backward()
        opt.step()
        assert opt.global_steps == 1


# -- dtypes that meet in forward ----------------------------------------------------------------------------


class Meets(nn.Module):
    """A layer, and an operation in which its output meets something of fp32; or of its own dtype, as is told."""

    def __init__(self, how: str, right: bool):
        super().__init__()
        self.how, self.right = how, right
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", torch.eye(3))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        like = {"dtype": h.dtype} if self.right else {}
        table = self.table.to(h.dtype) if self.right else self.table
        made = torch.ones(3, 3, **like)
        return {
            "buffer": lambda: h @ table,
            "made": lambda: F.linear(h, made),
            "attention": lambda: F.scaled_dot_product_attention(h[None], made[None], made[None])[0],
            "index": lambda: torch.zeros(4, 3, **like).index_put((torch.arange(4),), h),
            "lerp": lambda: torch.lerp(h[:3], table, 0.5),
        }[self.how]()


class Distances(nn.Module):
    def __init__(self, right):
        super().__init__()
        self.centers, self.right = nn.Parameter(torch.randn(5, 4)), right

    def forward(self, x):
        if self.right:
            return torch.cdist(x.float(), self.centers.float()).to(x.dtype)
        return torch.cdist(x, self.centers)


def in_fp32(layer, right):
    if right:
        inner = layer.parametrizations.weight[0]
        forward = inner.forward
        inner.forward = lambda w: forward(w.float()).to(w.dtype)
    return layer


# By name: the module, right or wrong; words of the note; and what else the pipeline is given to be right.
OF_TORCH = {
    "spectral": (
        lambda right: parametrizations.spectral_norm(nn.Linear(4, 4)),
        ("0.parametrizations.weight.0 (_SpectralNorm)", "weight.0._u torch.float32", "buffer_dtype=torch.bfloat16"),
        {"buffer_dtype": torch.bfloat16},
    ),
    "orthogonal": (
        lambda right: in_fp32(parametrizations.orthogonal(nn.Linear(4, 4)), right),
        ("0.parametrizations.weight.0 (_Orthogonal)", "forward(w.float()).to(w.dtype)"),
        {},
    ),
    "cayley": (
        lambda right: in_fp32(parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), right),
        ("0.parametrizations.weight.0 (_Orthogonal)", "forward(w.float()).to(w.dtype)"),
        {},
    ),
    "old spectral": (
        lambda right: nn.utils.spectral_norm(nn.Linear(4, 4)),
        ("0 (Linear)", "0.weight_u torch.float32", "buffer_dtype=torch.bfloat16"),
        {"buffer_dtype": torch.bfloat16},
    ),
    "cdist": (Distances, ("0 (Distances)", "no kernel of this function for torch.bfloat16", "x.float()"), {}),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated")
@pytest.mark.parametrize("name", OF_TORCH)
def test_modules_of_torch_that_do_not_compute_in_bf16_are_named(name):
    """And what the note says to write has the numbers of fp32."""
    make, words, more = OF_TORCH[name]
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))

    def trained(right, *casts):
        torch.manual_seed(0)
        model = nn.Sequential(make(right))
        opt = zf.attach(model, zf.chain(*casts, zf.sgd(0.1)))
        before = [p.detach().clone() for p in model.parameters()]
        model(x).float().square().mean().backward()
        opt.step()
        return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]

    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        trained(False, zf.precision(torch.bfloat16))
    (told,) = caught.value.__notes__
    assert all(word in told for word in words), told
    for got, want in zip(trained(True, zf.precision(torch.bfloat16, **more)), trained(True), strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * float(want.abs().max()))


@pytest.mark.parametrize("pipe", ["cast", "both"])
@pytest.mark.parametrize("how", ["buffer", "made", "attention", "index", "lerp"])
def test_what_stays_in_fp32_is_told_where_torch_refuses(how, pipe):
    model = Meets(how, right=False)
    zf.attach(model, PIPES[pipe]())
    with pytest.raises(RuntimeError) as caught:
        model(X)
    (told,) = caught.value.__notes__
    assert told.startswith("zerofn: the pipeline has torch.bfloat16 parameters and inputs in forward")
    assert "buffers have their own dtypes: table torch.float32; a tensor made in forward is torch.float32" in told
    assert "self.buffer.to(x.dtype)" in told and "torch.zeros(n, dtype=x.dtype)" in told and "steps" not in told
    # As it says, with the numbers of plain torch.
    torch.manual_seed(0)
    model, plain = Meets(how, right=True), Meets(how, right=True)
    plain.load_state_dict(model.state_dict())
    opt = zf.attach(model, PIPES[pipe]())
    torch.testing.assert_close(model(X).float(), plain(X), rtol=2e-2, atol=2e-2)
    model(X).float().sum().backward()
    opt.step()


def test_spectral_norm():
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    zf.attach(model, PIPES["cast"]())
    with pytest.raises(RuntimeError) as caught:
        model(X)
    assert "parametrizations.weight.0._u torch.float32, parametrizations.weight.0._v" in caught.value.__notes__[0]


def test_errors_that_are_of_something_else_are_left_alone():
    for pipe in PIPES:
        model = Meets("buffer", right=True)
        zf.attach(model, PIPES[pipe]())
        others = {path: p.detach().clone() for path, p in model.named_parameters()}
        for call in (model, lambda x, m=model, p=others: torch.func.functional_call(m, p, (x,))):
            with pytest.raises(RuntimeError) as caught:
                call(torch.ones(2, 5))
            assert not hasattr(caught.value, "__notes__"), pipe
    # Without a cast nothing is told, and a call made while an error is handled is not blamed for it.
    model = Meets("buffer", right=True)
    zf.attach(model, PIPES["both"]())
    try:
        raise RuntimeError("expected scalar type Float but found BFloat16")
    except RuntimeError as error:
        model(X)
        assert not hasattr(error, "__notes__")
    model = Meets("buffer", right=True).to(BF16)
    zf.attach(model, PIPES["scaled"]())
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(X)
    assert not hasattr(caught.value, "__notes__")


# -- torch.jit, torch.export, torch.fx ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("pipe", PIPES)
def test_tracing_an_attached_model(pipe):
    """Right where nothing is hooked; refused elsewhere, and right after detach."""
    model = net()
    opt = zf.attach(model, PIPES[pipe]())
    if pipe == "plain":
        traced = torch.jit.trace(model, X)
        model(X).sum().backward()
        opt.step()
        torch.testing.assert_close(traced(X), model(X))
        return
    with pytest.raises(RuntimeError, match=r"torch.jit.trace of an attached model(.|\n)*opt.detach\(\), example\)"):
        torch.jit.trace(model, X)
    model(X).float().sum().backward()
    opt.step()
    plain = opt.detach()
    torch.testing.assert_close(torch.jit.trace(plain, X)(X), plain(X))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.gain = net(), nn.Parameter(torch.full((3,), 1.5))

    def forward(self, x):
        return self.inner(self.gain * x)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("record", [torch.jit.script, torch.fx.symbolic_trace])
@pytest.mark.parametrize("pipe", PIPES)
def test_scripts_and_symbolic_traces(pipe, record):
    """Where modules have hooks a symbolic trace would have constants for parameters of submodules."""
    model = nn.Sequential(Outer())
    opt = zf.attach(model, PIPES[pipe]())
    if pipe != "plain":
        name = f"{record.__module__.partition('._')[0]}.{record.__name__}"
        with pytest.raises((RuntimeError, AttributeError), match=rf"{name} of an attached model(.|\n)*opt.detach\(\)"):
            record(model)
        opt.detach()
    torch.testing.assert_close(record(model)(X), model(X))


@pytest.mark.parametrize("pipe", PIPES)
def test_a_graph_of_make_fx_has_the_numbers_of_the_model(pipe):
    """Its derivatives too if they are taken inside; and later values of parameters."""
    model = Outer()
    opt = zf.attach(model, PIPES[pipe]())

    def loss_and_gradients(x):
        loss = model(x).float().square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    graph = make_fx(loss_and_gradients)(X)
    for _ in range(2):
        model(X).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        got, want = graph(2 * X), loss_and_gradients(2 * X)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("pipe", PIPES)
def test_exporting_an_attached_model(pipe):
    """Right where nothing is hooked; refused elsewhere, and right after detach."""
    model = net()
    opt = zf.attach(model, PIPES[pipe]())
    if pipe != "plain":
        with pytest.raises(RuntimeError, match=r"torch.export.export of an attached model(.|\n)*opt.detach\(\), exam"):
            torch.export.export(model, (X,))
    model(X).float().sum().backward()
    opt.step()
    plain = model if pipe == "plain" else opt.detach()
    torch.testing.assert_close(torch.export.export(plain, (X,)).module()(X), plain(X))
