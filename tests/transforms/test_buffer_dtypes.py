"""Dtypes of buffers, at every stage and by both routes, against steps written out in plain torch."""

from __future__ import annotations

import pytest
import rank_programs as P
import torch
import torch.nn.functional as F
from stages import STAGES, around
from time_limits import limit
from torch import nn
from torch.func import functional_call

import zerofn as zf

BF16, F32 = torch.bfloat16, torch.float32


class Model(nn.Module):
    """A table that is multiplied with, running statistics, integers, and complex numbers."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("table", torch.rand(6))
        self.register_buffer("order", torch.arange(6).flip(0))
        self.register_buffer("turns", torch.polar(torch.ones(6), torch.arange(6.0)), persistent=False)

    def forward(self, x):
        self.seen = {name: b.dtype for name, b in self.named_buffers()}
        x = self.norm(self.layer(x)) * self.table
        return self.head(x[:, self.order])


NARROW = {"table": BF16, "norm.running_mean": BF16, "norm.running_var": BF16}
KEPT = {"order": torch.int64, "turns": torch.complex64, "norm.num_batches_tracked": torch.int64}
STEPS = 4


def pipeline(stage, precision):
    return zf.chain(*around(stage, precision, *([zf.accumulate(2)] if window_of(stage) == 2 else [])), zf.sgd(0.5))


def window_of(stage):
    return 2 if stage in ("ZeRO-1", "ZeRO-2") else 1


def data(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


def narrow_buffers(model):
    return {name: b.detach().to(NARROW.get(name, b.dtype), copy=True) for name, b in model.named_buffers()}


def loss_of(model, params, buffers, x, y):
    return F.mse_loss(functional_call(model, {**params, **buffers}, (x.to(BF16),)).float(), y)


def run(stage):
    """By both routes, from each the parameters and buffers at the end."""
    rank = P.rank_and_size()[0]
    model, plain = Model(), Model()
    opt = zf.attach(model, pipeline(stage, zf.precision(BF16, buffer_dtype=BF16)))
    tx = pipeline(stage, zf.precision(BF16))
    buffers, state = narrow_buffers(plain), zf.init(tx, dict(plain.named_parameters()))
    step = zf.make_step(lambda p, x, y: loss_of(plain, p, buffers, x, y), tx)
    for i in range(STEPS):
        x, y = data(i, rank)
        F.mse_loss(model(x).float(), y).backward()
        opt.step()
        opt.zero_grad()
        state, _ = step(state, x, y)
    eager = {k: p.clone() for k, p in zf.full_params(opt.tx, opt.state).items()}
    attached = {k: b.clone() for k, b in model.named_buffers()}
    opt.detach()
    return zf.full_params(tx, state), eager, buffers, attached, model.seen, dict(model.named_buffers())


def every_stage():
    return {stage: run(stage) for stage in STAGES}


def by_hand(window):
    """Steps of one process on fp32 parameters that are seen in bf16, beside buffers in bf16."""
    model = Model()
    stored, buffers = {k: p.detach() for k, p in model.named_parameters()}, narrow_buffers(model)
    held = []
    for step in range(STEPS):
        seen = {k: p.to(BF16).requires_grad_() for k, p in stored.items()}
        held.append(torch.autograd.grad(loss_of(model, seen, buffers, *data(step, 0)), list(seen.values())))
        if len(held) == window:
            for (k, p), *gs in zip(stored.items(), *held, strict=True):
                stored[k] = p - 0.5 * (sum(g.float() for g in gs) / window)
            held = []
    return stored, buffers


def test_at_every_stage_and_by_both_routes():
    for stage in STAGES:
        params, eager, buffers, attached, seen, after = run(stage)
        want, statistics = by_hand(window_of(stage))
        assert seen == NARROW | KEPT, stage
        for k in want:
            # One process: the same operations, to the bit.
            assert torch.equal(eager[k], want[k]) and torch.equal(params[k], want[k]), (stage, k)
        for k, x in statistics.items():
            assert torch.equal(attached[k], x) and attached[k].dtype == x.dtype, (stage, k)
            # Detached, each has its own dtype again, and what has been written.
            assert after[k].dtype == dict(Model().named_buffers())[k].dtype, (stage, k)
            assert torch.equal(after[k].to(x.dtype), x), (stage, k)
        assert not torch.equal(statistics["norm.running_mean"], torch.zeros(6, dtype=BF16)), stage
    for rank in zf.launch(every_stage, 2, timeout=limit()):
        for stage, (params, eager, buffers, attached, seen, _) in rank.items():
            assert seen == NARROW | KEPT, stage
            # Law 2: the same bits by both routes, of statistics too, which are each rank's own.
            assert all(torch.equal(params[k], eager[k]) for k in eager), stage
            assert all(torch.equal(buffers[k], attached[k]) for k in buffers), stage


def test_without_it_buffers_stay_and_normalisation_is_in_their_dtype():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    opt = zf.attach(model, zf.chain(zf.precision(BF16), zf.sgd(0.1)))
    assert model(torch.ones(3, 4)).dtype == BF16
    assert {b.dtype for b in model.buffers()} == {F32, torch.int64}
    assert {row.dtype for row in zf.describe(opt).buffers} == {F32, torch.int64}


def test_detached_they_are_the_tensors_they_were_and_lose_no_bits():
    model = Model()
    model.again, model.also = model.norm, nn.Module()
    model.also.register_buffer("table", model.table)
    objects, before = dict(model.named_buffers()), {k: b.clone() for k, b in model.named_buffers()}
    opt = zf.attach(model, zf.chain(zf.precision(BF16, buffer_dtype=BF16), zf.sgd(0.1)))
    assert model.also.table is model.table and model.table.dtype == BF16
    model.table[0] = 3.0
    opt.detach()
    assert all(b is objects[k] for k, b in model.named_buffers()) and model.also.table is objects["table"]
    # 3 is written; the others have digits that bf16 has not.
    assert torch.equal(model.table, torch.cat([torch.tensor([3.0]), before["table"][1:]]))
    assert not torch.equal(before["table"], before["table"].to(BF16).float())
    # What the model put in the place of one is its own business.
    opt = zf.attach(model, zf.chain(zf.precision(BF16, buffer_dtype=BF16), zf.sgd(0.1)))
    model.table = new = torch.ones(2)
    opt.detach()
    assert model.table is new and model.norm.running_mean is objects["norm.running_mean"]


def test_by_label_and_as_it_is_told():
    labels = lambda path: "narrow" if path in ("table", "layer.weight", "layer.bias") else "wide"  # noqa: E731
    given = {"narrow": BF16, "wide": None}
    tx = zf.chain(zf.precision(BF16, buffer_dtype=given, labels=labels), zf.sgd(0.1))
    model = Model()
    plan = zf.plan(tx, model)
    assert model.table.dtype == F32
    opt = zf.attach(model, tx)
    told = zf.describe(opt)
    dtypes = {row.path: row.dtype for row in told.buffers}
    assert dtypes == {name: b.dtype for name, b in model.named_buffers()}
    assert dtypes == {**KEPT, "table": BF16, "norm.running_mean": F32, "norm.running_var": F32}
    assert told == plan and "buffers of the model, beside the state" in str(told)
    # In no sum: a state has none.
    assert told.bytes == zf.describe(opt.state).bytes and not zf.describe(opt.state).buffers
    model(torch.ones(3, 4))
    assert model.seen["table"] == BF16 and model.seen["norm.running_mean"] == F32


def test_saved_and_resumed(tmp_path):
    def trained(steps, resume=None):
        model = Model()
        tx = zf.chain(zf.shard(), zf.precision(BF16, buffer_dtype=BF16), zf.adamw(0.1))
        opt = zf.attach(model, tx)
        if resume:
            zf.load(resume, like=opt)
        for i in range(int(opt.state.step), steps):
            x, y = data(i, 0)
            F.mse_loss(model(x).float(), y).backward()
            opt.step()
            opt.zero_grad()
        return model, opt

    model, opt = trained(2)
    zf.save(tmp_path / "save", opt)
    (model, _), (again, _) = trained(4), trained(4, tmp_path / "save")
    for (k, x), (_, y) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype, k
    plain = zf.attach(Model(), zf.chain(zf.shard(), zf.precision(BF16), zf.adamw(0.1)))
    with pytest.raises(ValueError, match=r"buffers/table: .*bfloat16"):
        zf.load(tmp_path / "save", like=plain)


def test_of_a_model_from_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    zf.materialize(model, zf.chain(zf.precision(BF16, buffer_dtype=BF16), zf.sgd(0.1)))
    assert model[1].running_var.dtype == BF16 and torch.equal(model[1].running_var, torch.ones(6, dtype=BF16))


def test_what_meets_in_two_dtypes_is_told():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("table", torch.ones(4))

        def forward(self, x):
            return self.last(self.layer(x) * self.table)

    model = nn.Sequential(Scaled())
    opt = zf.attach(model, zf.chain(zf.precision(BF16), zf.sgd(0.1)))
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(1, 4))
    (told,) = error.value.__notes__
    assert "0.table torch.float32" in told and "precision(..., buffer_dtype=torch.bfloat16)" in told
    # As it says.
    opt.detach()
    zf.attach(model, zf.chain(zf.precision(BF16, buffer_dtype=BF16), zf.sgd(0.1)))
    assert model(torch.ones(1, 4)).dtype == BF16


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"buffer_dtype": torch.int8}, r"precision\(buffer_dtype=torch.int8\)"),
        (ValueError, {"buffer_dtype": {"x": torch.int8}, "labels": str}, r"precision\(buffer_dtype=torch.int8\)"),
        (ValueError, {"buffer_dtype": {"x": BF16}}, "a dict of dtypes needs labels="),
        (ValueError, {"buffer_dtype": BF16, "labels": str}, "no dtype is given by label"),
        (ValueError, {"buffer_dtype": {"x": BF16}, "labels": {"table": "x"}}, "a tree over parameters"),
        (ValueError, {"buffer_dtype": {"x": BF16}, "labels": lambda path: "y"}, "table: label 'y' is not in buffer_"),
        (ValueError, {"buffer_dtype": {"x": BF16, "z": None}, "labels": lambda path: "x"}, "no buffer has it; buffers"),
        (
            TypeError,
            {"buffer_dtype": {"x": BF16}, "labels": lambda path: [3]},
            r"labels of buffers\n  table: \[3\] cannot be a key of a dict",
        ),
    ],
)
def test_refusals_leave_the_model_as_it_was(error, options, message):
    model = Model()
    before = dict(model.named_buffers())
    with pytest.raises(error, match=message):
        zf.attach(model, zf.chain(zf.precision(**options), zf.sgd(0.1)))
    assert all(b is before[k] for k, b in model.named_buffers())
    zf.attach(model, zf.sgd(0.1))
