"""What of torch is refused over parts of sharded parameters, and what it says to write."""

import torch
from time_limits import limit
from torch import nn

import zerofn as zf


def said():
    model = nn.Linear(4, 6)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    found = []
    for wrong in (lambda: scaler.unscale_(opt), lambda: torch.optim.Muon([model.weight], lr=0.1).step()):
        try:
            wrong()
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_what_to_write_for_a_scaler_and_for_muon():
    for scaler, muon in zf.launch(said, 2, timeout=limit(60)):
        assert (
            'write: a transform in the chain of zf.attach; for torch.amp.GradScaler, zf.scale_loss("dynamic")' in scaler
        )
        assert "for torch.optim.Muon, zf.muon(lr) in the chain of zf.attach" in muon
