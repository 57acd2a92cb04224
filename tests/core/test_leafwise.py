"""Transforms of a user's own from a function on one tensor: what they return is checked, what they keep is theirs."""

import copy

import pytest
import torch

import zerofn as zf
from zerofn.kernels import print_torch, program  # inside: what computes leaves

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def difference(grad, param, state):
    """Keeps the gradient itself."""
    return grad - state, grad


def towards_the_start(grad, param, state):
    return grad + (param - state), state


def from_one_step_ago(grad, param, state):
    """Keeps the parameter itself."""
    return grad + param - state, param


def the_parameter(grad, param, state):
    return param, state


def the_gradient(grad, param, state):
    """An optimizer."""
    return grad, param


STARTS = {difference: torch.zeros_like, the_gradient: torch.zeros_like}


def made(function, needs="leaf"):
    start = STARTS.get(function, lambda p: p.view(-1).view(p.shape))
    return zf.leafwise(init=start, needs=needs, optimizer=function is the_gradient)(function)()


def expected(name, gradients):
    """By hand, in float64, with sgd(0.5)."""
    p = start().double()
    state = {"difference": p * 0}.get(name, p)
    for g in gradients:
        g = g.double()
        old, new = p, {"difference": g, "towards_the_start": state, "the_parameter": state}.get(name, p)
        out = {
            "difference": g - state,
            "towards_the_start": g + old - state,
            "from_one_step_ago": g + old - state,
            "the_parameter": old,
            "the_gradient": 2 * (old - g),
        }[name]
        p, state = p - 0.5 * out, new
    return p, state


def start():
    return torch.linspace(-1, 1, 5)


@pytest.fixture
def programs(monkeypatch):
    """Every leaf is computed by programs, as large ones are."""
    monkeypatch.setattr(program, "INSTEAD", [print_torch])


@pytest.mark.parametrize("route", ["pure", "donated", "eager"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("function", [difference, towards_the_start, from_one_step_ago, the_parameter, the_gradient])
@pytest.mark.parametrize("needs", ["leaf", "element", "programs"])
def test_what_a_transform_keeps_is_not_written_by_others(function, accumulate, route, needs, request):
    """Results are compared with one another in the first three updates of two leaves only."""
    name = function.__name__
    if needs == "programs":
        request.getfixturevalue("programs")
    gradients = [torch.linspace(i, 2 + i * i, 5) / 8 for i in range(9)]
    one = made(function, "leaf" if needs == "leaf" else "element")
    tx = zf.chain(zf.accumulate(accumulate), one, *([] if function is the_gradient else [zf.sgd(0.5)]))
    leaves = {"w": start(), "b": start()}
    if route == "eager":
        model = torch.nn.ParameterDict(leaves)
        opt = zf.attach(model, tx)
        for g in gradients:
            for _ in range(accumulate):
                (model["w"] * g + model["b"] * g).sum().backward()
                opt.step()
                # The caller writes into the gradients.
                opt.zero_grad(set_to_none=False)
        final, kept = {k: p.detach() for k, p in model.items()}, opt.state.transforms[name]["value"]
    else:
        state = zf.init(tx, leaves)
        step = zf.make_step(lambda p, g: (p["w"] * g + p["b"] * g).sum(), tx, donate=route == "donated")
        for g in gradients:
            for _ in range(accumulate):
                state, _ = step(state, g)
        final, kept = state.params, state.transforms[name]["value"]
    last, own = expected(name, gradients)
    for key in ("w", "b"):
        # Nine updates in fp32.
        torch.testing.assert_close(
            final[key].double() - start().double(), last - start().double(), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(kept[key].double(), own, rtol=1e-5, atol=1e-6)


def test_a_state_that_is_the_new_parameter_is_not_written_with_it():
    @zf.leafwise(init=torch.zeros_like, optimizer=True)
    def keeps_the_parameter(grad, param, state):
        return param - grad, param - grad

    @zf.leafwise(init=torch.zeros_like, optimizer=True)
    def keeps_the_same_tensor(grad, param, state):
        new = param - grad
        return new, new

    for made in (keeps_the_parameter, keeps_the_same_tensor):
        tx = zf.chain(made())
        state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.zeros(2)}))
        state.params["w"].fill_(5.0)
        assert state.transforms[made.__name__]["value"]["w"].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("function", [difference, towards_the_start, from_one_step_ago, the_gradient])
@pytest.mark.parametrize("needs", ["leaf", "element", "programs"])
def test_a_state_shares_no_memory_with_what_the_caller_has(function, needs, request):
    """In each of the steps: in the first three results are compared with one another."""
    if needs == "programs":
        request.getfixturevalue("programs")
    one = made(function, "leaf" if needs == "leaf" else "element")
    tx = zf.chain(one, *([] if function is the_gradient else [zf.sgd(0.5)]))
    state = zf.init(tx, {"w": start()})
    for i in range(6):
        g, old = {"w": torch.full((5,), 1.0 + i)}, state.params["w"]
        state, _ = zf.update(tx, g, state)
        new = [state.params["w"], state.transforms[one.name]["value"]["w"]]
        before = [x.clone() for x in new]
        for x in (g["w"], old):
            x.fill_(-7.0)
        torch.testing.assert_close(new, before, rtol=0, atol=0)
        new[0].fill_(0.25)
        torch.testing.assert_close(new[1], before[1], rtol=0, atol=0)


def test_a_state_of_its_own_is_not_copied():
    kept = []

    @zf.leafwise(init=torch.zeros_like)
    def momentum(grad, param, state):
        kept.append(state + grad)
        return kept[-1], kept[-1]

    tx = zf.chain(momentum(), zf.sgd(1.0))
    state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.zeros(2)}))
    assert state.transforms["momentum"]["value"]["w"] is kept[0]


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("last", [zf.sgd(1.0), zf.adamw(1.0)])
def test_results_of_a_wrong_shape_are_refused_by_path(optimizer, last):
    """Broadcast in silence, or read beyond their end by a fused kernel."""

    @zf.leafwise(optimizer=optimizer)
    def mean_of_columns(grad, param):
        return grad.mean(0, keepdim=True)

    tx = zf.chain(mean_of_columns()) if optimizer else zf.chain(mean_of_columns(), last)
    params = {"a": torch.ones(64, 4), "ok": torch.ones(1, 3), "b": torch.ones(2, 2)}
    with pytest.raises(ValueError) as caught:
        zf.update(tx, {k: torch.ones_like(p) for k, p in params.items()}, zf.init(tx, params))
    message = str(caught.value)
    assert message.startswith("mean_of_columns, a leafwise transform, returned")
    assert "  a: a tensor of shape (1, 4) for a leaf of shape (64, 4)\n  b: a tensor of shape (1, 2)" in message
    first = "new_param" if optimizer else "new_grad"
    assert message.endswith(f"write: return {first}, with {first}.shape == param.shape") and "ok:" not in message


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_an_optimizer_of_ones_own_keeps_the_stored_dtype(dtype):
    """Its gradients are fp32, and so is what it computes from them."""

    @zf.leafwise(optimizer=True)
    def descent(grad, param, *, lr):
        return param.float() - lr * grad.float()

    tx = zf.chain(zf.precision(store_dtype=dtype, grad_dtype=F32), descent(lr=0.5))
    state, _ = zf.update(tx, {"w": torch.full((2,), 0.25)}, zf.init(tx, {"w": torch.ones(2)}))
    assert state.params["w"].dtype == dtype and state.params["w"].tolist() == [0.875, 0.875]


class Difference:
    """As another library might write it: keeps the tree it is given."""

    def init(self, params):
        return {name: torch.zeros_like(p) for name, p in params.items()}

    def update(self, updates, state, params=None):
        return {name: -0.5 * (g - state[name]) for name, g in updates.items()}, updates


@pytest.mark.parametrize("donate", [False, True])
def test_what_a_transformation_of_another_library_keeps_is_its_own(donate):
    tx = zf.chain(zf.accumulate(2), Difference())
    state = zf.init(tx, {"w": start()})
    step = zf.make_step(lambda p, g: (p["w"] * g).sum(), tx, donate=donate)
    gradients = [torch.linspace(i, 2 + i * i, 5) for i in range(4)]
    for g in gradients:
        for _ in range(2):
            state, _ = step(state, g)
    change = expected("difference", gradients)[0] - start().double()
    torch.testing.assert_close(state.params["w"].double() - start().double(), change, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (5, "an int instead of a tensor"),
        (None, "a NoneType instead of a tensor"),
        (torch.ones(3, dtype=torch.complex64), "a tensor of torch.complex64; parameters and gradients are real"),
        (torch.ones(3, dtype=torch.int64), "a tensor of torch.int64; parameters and gradients are real"),
        (torch.ones(3) > 0, "a tensor of torch.bool; parameters and gradients are real"),
        (torch.ones(3, device="meta"), "a tensor on meta for a leaf on cpu"),
        (torch.ones(3).to_sparse(), "a tensor of layout torch.sparse_coo instead of a tensor"),
    ],
)
def test_results_that_are_no_real_tensors_of_the_leaf(returned, reason, optimizer):
    """Refused at the step by path, before anything changes; a complex number would lose its imaginary part."""
    own = zf.leafwise(lambda grad, param: returned if len(param) == 3 else grad, optimizer=optimizer)()
    tx = zf.chain(own) if optimizer else zf.chain(own, zf.sgd(1.0))
    params = {"ok": torch.ones(2), "w": torch.ones(3), "z": torch.ones(3)}
    state = zf.init(tx, params)
    with pytest.raises(ValueError) as caught:
        zf.update(tx, params, state)
    first = "new_param" if optimizer else "new_grad"
    rows = [f"<lambda>, a leafwise transform, returned\n  w: {reason}\n  z: {reason}\n  write: return {first}, with "]
    assert str(caught.value).startswith(rows[0])
    assert all(torch.equal(state.params[k], x) for k, x in params.items())


FORM = "a tensor of shape (3,), torch.float32"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: 5, "an int for its state"),
        (lambda state: state.sum(), f"a tensor of shape (), torch.float32 for its state, which init made {FORM}"),
        (lambda state: state.double(), f"a tensor of shape (3,), torch.float64 for its state, which init made {FORM}"),
        (lambda state: (state, state), "a state of another structure than init gave it"),
        (lambda state: None, "a NoneType for its state"),
    ],
)
def test_a_state_keeps_the_form_that_init_gave_it(change, reason):
    """Otherwise no checkpoint of it could be loaded into a state that begins anew."""
    tx = zf.chain(zf.leafwise(lambda g, p, state: (g, change(state)), init=torch.zeros_like)(), zf.sgd(1.0))
    with pytest.raises(ValueError, match=r"and a state of the shapes and dtypes that init gave it") as caught:
        zf.update(tx, {"w": torch.ones(3)}, zf.init(tx, {"w": torch.ones(3)}))
    assert f"\n  w: {reason}" in str(caught.value)


def test_a_state_may_be_a_dict():
    @zf.leafwise(init=lambda p: {"sum": torch.zeros_like(p), "count": torch.tensor(0)})
    def mean(grad, param, state):
        total, count = state["sum"] + grad, state["count"] + 1
        return total / count, {"sum": total, "count": count}

    tx = zf.chain(mean(), zf.sgd(1.0))
    state = zf.init(tx, {"w": torch.zeros(2)})
    for g in (1.0, 3.0):
        state, _ = zf.update(tx, {"w": torch.full((2,), g)}, state)
    assert state.params["w"].tolist() == [-3.0, -3.0]


@zf.leafwise(init=torch.zeros_like, optimizer=True, needs="element")
def warmed(grad, param, momentum, *, lr, step, path, beta=0.9):
    """Momentum that begins with the third update, and not for biases."""
    momentum = beta * (step >= 2) * (not path.endswith("bias")) * momentum + grad
    return param - lr * momentum, momentum


@pytest.mark.parametrize("route", ["pure", "attached"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_schedule_the_step_and_the_path(route, every):
    """By hand in a loop; micro-steps that are held are no steps."""
    rate = zf.schedules.cosine(0.5, 6)
    tx = zf.chain(zf.shard(), zf.accumulate(every), warmed(lr=rate))
    model = torch.nn.Linear(2, 1)
    expected = {k: p.detach().clone() for k, p in model.named_parameters()}
    momenta = {k: torch.zeros_like(p) for k, p in expected.items()}
    opt = zf.attach(model, tx) if route == "attached" else None
    state = zf.init(tx, copy.deepcopy(expected))
    for i in range(5 * every):
        grads = {k: torch.full_like(p, 1.0 + i // every) for k, p in expected.items()}
        if opt is not None:
            sum((p * grads[k]).sum() for k, p in model.named_parameters()).backward()
            opt.step()
            opt.zero_grad()
            state, metrics = opt.state, opt.metrics
        else:
            state, metrics = zf.update(tx, grads, state)
        if (i + 1) % every == 0:
            step = i // every
            assert float(metrics["lr"]) == pytest.approx(rate(step))
            for k, g in grads.items():
                momenta[k] = (0.9 if step >= 2 and k == "weight" else 0.0) * momenta[k] + g
                expected[k] = expected[k] - rate(step) * momenta[k]
    for k, p in expected.items():
        torch.testing.assert_close(state.leaves[k], p, rtol=1e-6, atol=0)
    assert int(state.transforms["warmed"]["step"]) == 5
    if opt is not None:
        assert opt.param_groups[0]["lr"] == pytest.approx(rate(4))


def test_what_the_library_gives_is_no_argument_and_a_default_makes_it_one():
    with pytest.raises(TypeError, match="warmed\\(\\) has no keyword 'step'"):
        warmed(lr=0.1, step=3)

    @zf.leafwise(needs="element")
    def own(grad, param, *, step=3, path="w"):
        return step * grad if path == "w" else grad

    tx = zf.chain(own(step=2), zf.sgd(1.0))
    state, _ = zf.update(tx, {"v": torch.ones(1)}, zf.init(tx, {"v": torch.zeros(1)}))
    assert float(state.params["v"]) == -2.0 and state.transforms["own"] == {}


def test_the_step_keeps_the_laws_and_goes_on_from_a_checkpoint(tmp_path):
    zf.testing.check_transform(warmed(lr=zf.schedules.cosine(0.1, 9)))
    tx, params = warmed(lr=zf.schedules.cosine(0.1, 9)), {"weight": torch.ones(3)}
    one = zf.init(tx, params)
    for i in range(6):
        if i == 3:
            zf.save(tmp_path / "kept", one)
        one, _ = zf.update(tx, {"weight": torch.full((3,), float(i))}, one)
    two = zf.load(tmp_path / "kept", like=zf.init(tx, params))
    for i in range(3, 6):
        two, _ = zf.update(tx, {"weight": torch.full((3,), float(i))}, two)
    assert torch.equal(one.params["weight"], two.params["weight"])


def test_rates_and_batches_of_a_schedule():
    """By the peak of a schedule, and over a batch of peaks: the derivative is minus the sum of momenta, by hand."""

    @zf.leafwise(optimizer=True, needs="element")
    def plain(grad, param, *, lr, step):
        return param - lr * (1 + step) * grad

    def run(peak):
        tx = plain(lr=lambda step: peak * (2 - step))
        state = zf.init(tx, {"w": torch.zeros(1)})
        for _ in range(2):
            state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        return state.params["w"].sum()

    peaks = torch.tensor([0.1, 0.2])
    torch.testing.assert_close(torch.func.vmap(run)(peaks), -4 * peaks)
    torch.testing.assert_close(torch.func.grad(run)(peaks[0]), torch.tensor(-4.0))
