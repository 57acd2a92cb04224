"""`materialize`: models from the meta device, in each rank's parts, against the same modules reset on one process."""

import gc
import math
import weakref

import pytest
import rank_programs as P
import torch
from stages import around, fronts
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.core.rank_agreement import seeded  # inside: what ranks ask each other

IN_BF16 = {"ZeRO-3 in bf16": lambda: around("ZeRO-3", zf.precision(store_dtype=torch.bfloat16))}
# On ranks the first is one of each rank's own, and means it.
STAGES = {"one process": lambda: [zf.local()]} | fronts("ZeRO-1", "ZeRO-3") | IN_BF16


class Model(nn.Module):
    """Tied, frozen, buffered; attention, whose reset writes into a module below it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.body = nn.Sequential(nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.body[0].bias.requires_grad_(False)

    def forward(self, i):
        x = self.embed(i)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x + self.body(x))


def on_meta(cls=Model):
    with torch.device("meta"):
        return cls()


def normal(path, x):
    return nn.init.normal_(x, std=0.1) if x.is_floating_point() else x.zero_()


def reference(seed):
    """The model whole, each module reset by itself in the order of constructors."""
    model = Model()
    # The tied weight is what the embedding makes of it.
    names = ["embed", "norm", "body.0", "body.2", "attention.out_proj", "attention"]
    for name in names:
        module = model.get_submodule(name)
        with seeded(seed, name, torch.device("cpu")):
            getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))()
    return model


def full(opt):
    model = opt.detach()
    return {k: x.clone() for k, x in model.state_dict().items()}


def everything():
    """By stage: what resets make, what `init` makes by both routes, and an output and its loss after two steps."""
    found = {}
    for stage, first in STAGES.items():
        tx = zf.chain(*first(), zf.adamw(0.01))
        before = torch.random.get_rng_state()
        reset = full(zf.materialize(on_meta(), tx, seed=3))
        model = on_meta()
        parameters = {k: p for k, p in model.named_parameters(remove_duplicate=False)}
        state = zf.init(tx, parameters, init=normal, seed=3)
        pure = {k: x.clone() for k, x in zf.full_params(tx, state).items()}
        opt = zf.materialize(model, tx, normal, seed=3)
        if opt._own.home.faces is None:
            assert all(p is parameters[k] for k, p in model.named_parameters(remove_duplicate=False))
        assert torch.equal(before, torch.random.get_rng_state())
        parts = {k: (tuple(x.shape), x.dtype) for k, x in opt.state.leaves.items()}
        assert parts == {k: (tuple(x.shape), x.dtype) for k, x in state.leaves.items()}
        for _ in range(2):
            loss = model(torch.arange(20).remainder(11).reshape(4, 5)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        found[stage] = reset, pure, full(opt), parts
    return found


@pytest.fixture(scope="module")
def alone():
    return everything()


def test_resets_are_those_of_one_process_module_by_module(alone):
    want = reference(3).state_dict()
    for stage, (reset, *_) in alone.items():
        narrow = {k: x.to(torch.bfloat16) if "bf16" in stage and "running" not in k else x for k, x in want.items()}
        for k, x in reset.items():
            assert torch.equal(x, narrow[k].to(x.dtype)) and (x.dtype == narrow[k].dtype or x.dtype == torch.int64), k


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_numbers_on_any_number_of_ranks(world, alone):
    shares = {}
    for here in zf.launch(everything, world, timeout=limit()):
        for stage, (reset, pure, trained, parts) in here.items():
            assert reset.keys() == alone[stage][0].keys() and pure.keys() == alone[stage][1].keys()
            assert all(torch.equal(x, alone[stage][0][k]) for k, x in reset.items()), stage
            assert all(torch.equal(x, alone[stage][1][k]) for k, x in pure.items()), stage
            # The same batch on every rank; means over ranks round, in bf16 to 8 bits of numbers up to 1.
            bound = 2**-7 if "bf16" in stage else 1e-5
            assert all(torch.allclose(x, alone[stage][2][k], atol=bound, rtol=0) for k, x in trained.items()), stage
            if stage != "one process":
                shares[stage] = shares.get(stage, 0) + math.prod(parts["body.0.weight"][0])
    assert set(shares.values()) == {56}


def test_draws_are_those_of_torch_after_the_seed_of_the_leaf():
    state = zf.init(zf.sgd(0.1), {"a": {"w": torch.empty(40, 50, device="meta")}}, init=normal, seed=7)
    w = state.params["a"]["w"]
    with seeded(7, "a.w", torch.device("cpu")):
        assert torch.equal(w, torch.empty(40, 50).normal_(0, 0.1))
    # 2000 draws: six standard errors.
    assert abs(w.mean()) < 6 * 0.1 / math.sqrt(2000) and abs(w.std() - 0.1) < 6 * 0.1 / math.sqrt(4000)
    others = [
        zf.init(zf.sgd(0.1), {p: torch.empty(40, 50, device="meta")}, init=normal, seed=s)
        for p, s in (("a.v", 7), ("a.w", 8))
    ]
    assert not any(torch.equal(w, x) for s in others for x in s.leaves.values())


class Layer(nn.Module):
    def __init__(self, alive):
        super().__init__()
        self.w = nn.Parameter(torch.empty(64, 64))
        self.alive = alive

    def reset_parameters(self):
        nn.init.normal_(self.w)
        self.alive.append(weakref.ref(self.w))


def alive_at_once():
    """Whole leaves that are alive each time that another one is made, by `init` and by resets."""
    tx, made, most = zf.chain(zf.shard(), zf.sgd(0.1)), [], []

    def init(path, x):
        gc.collect()
        most.append(sum(r() is not None for r in made))
        made.append(weakref.ref(x))
        x.fill_(1)

    zf.init(tx, {str(i): torch.empty(64, 64, device="meta") for i in range(6)}, init=init)
    resets = []
    with torch.device("meta"):
        models = [nn.Sequential(*[Layer(resets) for _ in range(6)]) for _ in range(2)]
    zf.materialize(models[0], tx, init)
    opt = zf.materialize(models[1], tx)
    gc.collect()
    return most, sum(r() is not None for r in resets), sum(p.numel() for p in opt.state.leaves.values())


def test_one_leaf_at_a_time_is_whole():
    for most, left, own in zf.launch(alive_at_once, 2, timeout=limit()):
        assert most == [0] * 12 and left == 0 and own == 6 * 64 * 64 // 2


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(2, 2)
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x):
        return self.l(x) * self.mask + self.w.sum()


class Half(Nothing):
    def reset_parameters(self):
        nn.init.ones_(self.w)


def test_refused_with_what_to_write():
    tx = zf.sgd(0.1)
    with pytest.raises(ValueError, match=r"(?s)0.w: Nothing has no.*0.mask: .*constructor.*lost.*init=lambda") as error:
        zf.materialize(nn.Sequential(on_meta(Nothing)), tx)
    assert "0.l.weight" not in str(error.value)
    model = nn.Sequential(on_meta(Half))
    with pytest.raises(ValueError, match=r"0.mask: left unset by Half.reset_parameters"):
        zf.materialize(model, tx)
    # Nothing of it was changed.
    assert all(x.is_meta for x in model.state_dict().values())
    with pytest.raises(ValueError, match=r"Half.reset_parameters is the whole model's"):
        zf.materialize(on_meta(Half), tx)
    with pytest.raises(ValueError, match=r"(?s)init\('w'.*some elements were not written.*normal_"):
        zf.init(tx, {"w": torch.empty(3, device="meta")}, init=lambda path, x: torch.ones(3))
    with pytest.raises(ValueError, match="NaN in parameters\n  w:"):
        zf.init(tx, {"w": torch.full((3,), torch.nan)}, init=normal)
    with pytest.raises(TypeError, match="a function of a path"):
        zf.materialize(model, tx, init=0.02)
    with pytest.raises(TypeError, match="a seed is an int"):
        zf.materialize(model, tx, seed=1.0)
    with pytest.raises(TypeError, match=r"zf.init\(tx, params, init=init\)"):
        zf.materialize({"w": torch.empty(3, device="meta")}, tx)
    opt = zf.materialize(model, tx, init=lambda path, x: x.fill_(2.0))
    assert model(torch.ones(1, 2)).tolist() == [[18.0, 18.0]] and opt.state.leaves["0.w"].tolist() == [2.0] * 3


def test_what_is_there_stays():
    model = nn.Sequential(nn.Linear(2, 3), on_meta(lambda: nn.Linear(3, 1)))
    kept = model[0].weight.detach().clone()
    zf.materialize(model, zf.sgd(0.1))
    assert torch.equal(model[0].weight, kept) and not model[1].weight.isnan().any()
    model = nn.Sequential(nn.Linear(2, 3), on_meta(lambda: nn.Linear(3, 1)))
    model[0].bias.data[1] = torch.nan
    with pytest.raises(ValueError, match=r"0\.bias"):
        zf.materialize(model, zf.sgd(0.1))
    assert model[1].weight.is_meta


def by_rank():
    rank, _ = P.rank_and_size()
    tx = zf.chain(zf.shard(), zf.sgd(0.1))
    meta = {"w": torch.empty(3, device="meta"), "v": torch.empty(2, device="meta")}

    def fails(path, x):
        if rank == 1:
            raise OSError("no such file")
        x.zero_()

    messages = []
    for init in (lambda path, x: x.fill_(rank if path == "w" else 1), fails):
        try:
            zf.init(tx, meta, init=init)
        except (ValueError, OSError) as error:
            messages.append(str(error))
    return messages


class Counted(nn.Linear):
    """With a parameter of integers, which no optimizer trains."""

    def __init__(self):
        super().__init__(3, 2)
        self.counts = nn.Parameter(torch.empty(4, dtype=torch.int64), requires_grad=False)

    def reset_parameters(self):
        super().reset_parameters()
        if "counts" in self._parameters:
            self.counts.fill_(7)


@pytest.mark.parametrize("init", [None, lambda path, x: x.fill_(7)], ids=["reset", "init"])
def test_integers_are_made_and_what_was_put_on_a_parameter_stays(init):
    model = on_meta(Counted)
    model.weight.decay = "none"
    weight = model.weight
    opt = zf.materialize(model, zf.chain(zf.shard(), zf.sgd(0.1)), init)
    assert model.weight is weight
    assert weight.decay == "none"
    assert torch.equal(model.counts, torch.full((4,), 7))
    assert isinstance(model.counts, nn.Parameter)
    assert not model.counts.requires_grad
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    assert torch.equal(opt.detach().counts, torch.full((4,), 7))


def test_ranks_that_make_other_numbers_or_none():
    first, second = zf.launch(by_rank, 2, timeout=limit())
    assert all(
        "w: rank 1 has other values than rank 0" in m[0] and "seeded for each leaf" in m[0] for m in (first, second)
    )
    assert "v:" not in first[0]
    assert first[1] == "parameters could not be initialised on rank 1: no such file" and second[1] == "no such file"
