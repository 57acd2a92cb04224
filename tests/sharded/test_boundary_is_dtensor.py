"""What torch's own libraries find of a sharded model: DTensors, which they read, write and load."""

import copy
import io
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from outside_programs import loss_of, make
from rank_programs import rank_and_size
from small_parts import said
from stages import around
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zerofn as zf


def shown():
    rank, size = rank_and_size()
    model, plain = make(), make()
    old = model.odd.weight
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    mesh = init_device_mesh("cpu", (size,))
    for m in (model, plain):
        loss_of(m).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        mine = [*q.detach().chunk(size), *[q.detach()[:0]] * size][rank] if q.dim() else None
        for x, whole in ((p, q), (p.data, q), (p.detach(), q), (p.grad, q.grad), (model.state_dict()[name], q)):
            assert isinstance(x, DTensor) and x.shape == q.shape and x.stride() == q.stride(), name
            assert x.device_mesh.mesh.tolist() == mesh.mesh.tolist()
            # Three thirds of a gradient are not always the gradient.
            near = dict(rtol=4e-16 if x is p.grad and size == 3 else 0, atol=0)
            torch.testing.assert_close(x.full_tensor(), whole, **near)
            if q.dim():
                assert x.placements == (Shard(0),) and x.to_local().shape == mine.shape, name
                other = x.redistribute(placements=[Replicate()])
                torch.testing.assert_close(other.to_local(), whole, **near)
        assert isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad and p.grad.requires_grad is False
        if q.dim():
            # The rows by themselves have a gradient, as in torch, on the same memory.
            assert torch.equal(p.to_local(), mine) and p.to_local().data_ptr() == p.data.to_local().data_ptr()
            (g,) = torch.autograd.grad((p.to_local() ** 2).sum(), p)
            assert isinstance(g, DTensor) and torch.equal(g.to_local(), 2 * mine)
    w, full = model.odd.weight, torch.arange(6.0, dtype=torch.float64).view(3, 2)
    made = distribute_tensor(full, w.device_mesh, w.placements)
    with torch.no_grad():
        w.copy_(made)
        assert torch.equal(w.full_tensor(), full)
        w.data = made * 2
        assert torch.equal(w.full_tensor(), 2 * full) and torch.equal(
            zf.full_params(opt.tx, opt.state)["odd.weight"], 2 * full
        )
    w.grad = made
    assert torch.equal(w.grad.full_tensor(), full) and isinstance(w.grad, DTensor)
    opt.step()
    assert torch.equal(w.full_tensor(), 2 * full - 0.1 * full)
    trained_by_torch = torch.optim.SGD([old], lr=0.1)
    told = [
        said(use)
        for use in (
            lambda: old.norm(),
            lambda: old.data,
            lambda: old.shape,
            lambda: copy.deepcopy(old),
            lambda: torch.save(old, io.BytesIO()),
            trained_by_torch.step,
            trained_by_torch.zero_grad,
            lambda: torch.nn.utils.clip_grad_norm_([old], 1.0),
        )
    ]
    opt.detach()
    assert old.shape == (3, 2) and old.grad is None
    told.append(said(lambda: w.grad))
    assert model.odd.weight is old and torch.equal(old, 2 * full - 0.1 * full)
    return told


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parameters_gradients_and_state_dicts_are_dtensors(ranks):
    reads = ("norm", "p.data", "p.shape", "copy.deepcopy", "torch.save", "p.grad", "p.grad", "p.grad")
    for *before, after in zf.launch(shown, ranks, timeout=limit()):
        for read, told in zip(reads, before, strict=True):
            assert re.search(
                rf"{read} of the parameter odd.weight from before zf.attach(.|\n)*model.parameters\(\)", told
            ), told
        assert re.search(r"p.grad of a parameter from before opt.detach(.|\n)*model.parameters\(\)", after), after


def checkpoints(folder):
    model = make()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    saved = {n: x for n, x in model.state_dict().items() if x.dim()}
    dcp.save({"model": saved}, checkpoint_id=folder)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0)
    # In place: what is read is in the parameters.
    dcp.load({"model": {n: x for n, x in model.state_dict().items() if x.dim()}}, checkpoint_id=folder)
    found = [p.full_tensor().detach() for p in model.parameters() if p.dim()]
    opt.detach()
    return found


def test_a_checkpoint_of_torch_is_loaded_in_place(tmp_path):
    for found in zf.launch(checkpoints, 2, str(tmp_path), timeout=limit()):
        for got, want in zip(found, [p for p in make().parameters() if p.dim()], strict=True):
            assert torch.equal(got, want)


def wrong_optimizers():
    model = nn.Linear(4, 6)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    muon = lambda: torch.optim.Muon([model.weight], lr=0.1).step()  # noqa: E731
    return [str(said(wrong)) for wrong in (lambda: scaler.unscale_(opt), muon)]


def test_what_to_write_for_a_scaler_and_for_muon():
    for scaler, muon in zf.launch(wrong_optimizers, 2, timeout=limit()):
        write = 'write: a transform in the chain of zf.attach; for torch.amp.GradScaler, zf.scale_loss("dynamic")'
        assert write in scaler and "for torch.optim.Muon, zf.muon(lr) in the chain of zf.attach" in muon


def states():
    found = {}
    for stage in ("ZeRO-1", "ZeRO-2", "ZeRO-3"):
        model = make()
        opt = zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), zf.adamw(0.1)))
        loss_of(model).backward()
        opt.step()
        kept = [opt.state[p]["exp_avg"] for p in model.parameters() if p.dim()]
        assert all(isinstance(x, DTensor) and x.placements == (Shard(0),) for x in kept), stage
        found[stage] = [x.full_tensor() for x in kept]
        opt.detach()
    return found


def test_states_are_dtensors_wherever_they_are_cut():
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), 0.1)
    loss_of(plain).backward()
    optimizer.step()
    want = [optimizer.state[p]["exp_avg"] for p in plain.parameters() if p.dim()]
    for found in zf.launch(states, 2, timeout=limit()):
        for kept in found.values():
            torch.testing.assert_close(kept, want, rtol=1e-12, atol=1e-15)
