"""A small GPT on bytes in plain torch: it knows nothing of zerofn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # every byte is a token


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to what it reads."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.attention_out = nn.Linear(d_model, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, d_model = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, d_model // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, seq, d_model))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. About 12 * layers * d_model**2 parameters."""

    def __init__(self, d_model: int, layers: int, heads: int, seq: int):
        super().__init__()
        self.seq = seq
        self.tokens = nn.Embedding(VOCABULARY, d_model)
        self.positions = nn.Embedding(seq, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)
        self.initialise(layers)

    def initialise(self, layers: int) -> None:
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # Each block adds to the residual twice; its scale is kept at that of the embedding.
                residual = name.endswith(("attention_out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, bytes_in: Tensor, first: int = 0) -> Tensor:
        """Logits of bytes that begin at position `first` of their sequence."""
        x = self.tokens(bytes_in) + self.positions.weight[first : first + bytes_in.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Mean cross-entropy in nats per byte, in fp32 whatever the model computes in; `"none"`: of each byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.no_grad()
def generate(logits_of, prompt: bytes, length: int, seq: int, device: torch.device, seed: int = 0) -> str:
    """Continue `prompt` by `length` bytes, drawn at temperature 0.8 from `logits_of(bytes)`."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        context = torch.tensor(text[-seq:], device=device)
        logits = logits_of(context[None])[0, -1].float().cpu()
        text.append(int(torch.multinomial(torch.softmax(logits / 0.8, 0), 1, generator=generator)))
    return bytes(text).decode("utf-8", errors="replace")
