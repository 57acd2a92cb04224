"""Digits with captions, an encoder of images, and a language model that reads what the encoder makes of them."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTION = len("a three.")
PATCHES, PATCH = 4, 16  # of an image of 8 x 8, each of 4 x 4
START, END = 1, ord(".")
HELD_OUT = 297


@cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits as (images, patches, numbers), and the bytes of their captions; zeros after the end."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 16
    patches = images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), PATCHES, PATCH)
    captions = [f"a {WORDS[label]}.".encode().ljust(CAPTION, b"\0") for label in found.target]
    # In an order that is nobody's: writers of the digits follow one another.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return patches[order], torch.tensor([list(caption) for caption in captions])[order]


def rows_of(step: int, batch: int, seed: int) -> Tensor:
    """Which images the batch of a step has, the same wherever it is asked."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randperm(len(digits()[0]) - HELD_OUT, generator=generator)[:batch] + HELD_OUT


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Vision(nn.Module):
    """Patches (batch, 4, 16) to embeddings (batch, 4, width)."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.patches, self.places = nn.Linear(PATCH, width), nn.Parameter(0.02 * torch.randn(PATCHES, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, patches: Tensor) -> Tensor:
        return self.norm(self.blocks(self.patches(patches) + self.places))


class Text(nn.Module):
    """Embeddings of an image and the bytes so far to the next byte, at every place of the sequence."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, width), nn.Parameter(0.02 * torch.randn(PATCHES + CAPTION, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, images: Tensor, caption: Tensor, part: int = 0, parts: int = 1) -> Tensor:
        """Of the sequence of `images` and `caption` (batch, 8), the logits of one of several parts."""
        x = torch.cat([images, self.bytes(caption)], dim=1) + self.places
        x = x.tensor_split(parts, dim=1)[part]
        return self.head(self.norm(self.blocks(x)))


def models(width: int, layers: int, seed: int) -> tuple[Vision, Text]:
    """Both, with the same numbers wherever they are made."""
    torch.manual_seed(seed)
    return Vision(width, layers), Text(width, layers)


def shifted(caption: Tensor) -> Tensor:
    """What is read before each byte of the caption."""
    return F.pad(caption[:, :-1], (1, 0), value=START)


def targets_of(caption: Tensor) -> tuple[Tensor, Tensor]:
    """The byte to come at each place of the sequence, and its weight: each caption counts as one, however long."""
    weights = (caption != 0).double()
    before = torch.zeros(len(caption), PATCHES)
    return torch.cat([before.long(), caption], 1), torch.cat([before, weights / weights.sum(1, keepdim=True)], 1)


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """One for each place."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
