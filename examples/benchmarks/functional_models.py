"""Two models as functions of a dict of leaves, in the operations of torch or of JAX: for `functional.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

HEADS = 4


class TorchOps:
    """What the models are made of, in torch."""

    tanh = staticmethod(torch.tanh)

    @staticmethod
    def gelu(x: Any) -> Any:
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    @staticmethod
    def attention(q: Any, k: Any, v: Any) -> Any:
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        return weights @ v

    @staticmethod
    def heads(x: Any) -> Any:
        return x.reshape(*x.shape[:-1], HEADS, -1).transpose(-2, -3)

    @staticmethod
    def joined(x: Any) -> Any:
        x = x.transpose(-2, -3)
        return x.reshape(*x.shape[:-2], -1)


def mlp(p: dict[str, Any], x: Any, y: Any, ops: Any = TorchOps) -> Any:
    """Four layers."""
    for i in range(3):
        x = ops.tanh(x @ p[f"w{i}"] + p[f"b{i}"])
    return ((x @ p["w3"] + p["b3"] - y) ** 2).mean()


def transformer(p: dict[str, Any], x: Any, y: Any, ops: Any = TorchOps) -> Any:
    """Twelve leaves in each layer, and four around them."""
    layers = (len(p) - 4) // 12
    h = x @ p["in.w"] + p["in.b"]
    for i in range(layers):
        w = {k: p[f"{i}.{k}"] for k in LAYER}
        a = ops.norm(h, w["n1.w"], w["n1.b"])
        qkv, width = a @ w["qkv.w"] + w["qkv.b"], h.shape[-1]
        q, k, v = (ops.heads(qkv[..., j * width : (j + 1) * width]) for j in range(3))
        h = h + ops.joined(ops.attention(q, k, v)) @ w["o.w"] + w["o.b"]
        a = ops.norm(h, w["n2.w"], w["n2.b"])
        h = h + ops.gelu(a @ w["up.w"] + w["up.b"]) @ w["down.w"] + w["down.b"]
    return ((h @ p["out.w"] + p["out.b"] - y) ** 2).mean()


LAYER = ("n1.w", "n1.b", "qkv.w", "qkv.b", "o.w", "o.b", "n2.w", "n2.b", "up.w", "up.b", "down.w", "down.b")
MODELS = {"mlp": mlp, "transformer": transformer}


def problem(name: str, width: int, layers: int, batch: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """First parameters, inputs and targets, the same for every library."""
    g = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (g.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)

    def zeros(n: int) -> np.ndarray:
        return np.zeros(n, np.float32)

    p: dict[str, np.ndarray] = {}
    if name == "mlp":
        shape = (batch, width)
        for i in range(4):
            p[f"w{i}"], p[f"b{i}"] = matrix(width, width), zeros(width)
    else:
        shape = (batch, 16, width)
        p["in.w"], p["in.b"] = matrix(width, width), zeros(width)
        wide = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        for i in range(layers):
            for key in LAYER:
                part, kind = key.split(".")
                if part in wide:
                    p[f"{i}.{key}"] = matrix(*wide[part]) if kind == "w" else zeros(wide[part][1])
                else:
                    p[f"{i}.{key}"] = np.ones(width, np.float32) if kind == "w" else zeros(width)
        p["out.w"], p["out.b"] = matrix(width, width), zeros(width)
    x = g.standard_normal(shape).astype(np.float32)
    return p, x, np.tanh(x[..., ::-1]).copy()
