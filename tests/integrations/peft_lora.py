"""LoRA of peft over frozen base weights, of floats and of 8-bit integers, as torch.optim trains it."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import zerofn as zf


class Quantized(nn.Module):
    """A projection whose weight is kept in 8 bits, frozen, with one scale, as quantizers do."""

    def __init__(self, layer: Conv1D):
        super().__init__()
        scale = layer.weight.detach().abs().max() / 127
        self.nf, self.nx = layer.nf, layer.nx
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale) + self.bias


def model(quantized: bool) -> Any:
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **off))
    for block in net.transformer.h if quantized else ():
        block.mlp.c_fc = Quantized(block.mlp.c_fc)
    return peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def train(quantized: bool, tx: Any, folder: str | None = None) -> dict[str, Tensor]:
    net = model(quantized)
    trained = [p for p in net.parameters() if p.requires_grad]
    opt: Any = torch.optim.AdamW(trained, 1e-2, fused=True) if tx is None else zf.attach(net, tx)
    x = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    for i in range(4):
        if i == 2 and folder is not None:
            zf.save(folder, opt)
            with torch.no_grad():
                for p in net.parameters():
                    p.zero_()
            opt.load_state(zf.load(folder, like=opt))
        net(input_ids=x, labels=x).loss.backward()
        opt.step()
        opt.zero_grad()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def main(folder: str) -> None:
    for quantized in (False, True):
        reference, start = train(quantized, None), dict(model(quantized).named_parameters())
        for mine in (train(quantized, zf.adamw(1e-2)), train(quantized, zf.adamw(1e-2), f"{folder}/{quantized}")):
            for name, p in mine.items():
                change = (reference[name] - start[name]).norm() if start[name].is_floating_point() else 0.0
                # Adam divides what is nearly nothing by its root.
                assert (p.double() - reference[name].double()).norm() <= 1e-5 * change, name
        assert any(p.dtype == torch.int8 for p in mine.values()) == quantized
        assert not any(n for n, p in mine.items() if "lora_A" in n and torch.equal(p, start[n]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[2])
    # One write: lines of ranks would mix.
    sys.stdout.write(f"right {sys.argv[1]}\n")
