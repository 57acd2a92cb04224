"""Functions of a sharded tensor `p` and a plain one `o` of the same shape, for the law that f(face) is f(whole).

`VALUES` are computed without a graph, `WRITES` write into `p`, `DIFFERENTIABLE` have derivatives. Those of matrices
are in a table of their own.
"""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

EACH = {
    "p + o": lambda p, o: p + o,
    "o + p": lambda p, o: o + p,
    "p - o": lambda p, o: p - o,
    "2 - p": lambda p, o: 2 - p,
    "p * 2 + 1": lambda p, o: p * 2 + 1,
    "o * p": lambda p, o: o * p,
    "p / (o^2 + 1)": lambda p, o: p / (o.square() + 1),
    "1 / (p^2 + 1)": lambda p, o: 1 / (p**2 + 1),
    "2 ** p": lambda p, o: 2**p,
    "-p": lambda p, o: -p,
    "abs": lambda p, o: p.abs(),
    "exp": lambda p, o: p.exp(),
    "expm1": lambda p, o: p.expm1(),
    "log1p": lambda p, o: torch.log1p(p.square()),
    "sqrt": lambda p, o: (p.square() + 1).sqrt(),
    "rsqrt": lambda p, o: (p.square() + 1).rsqrt(),
    "reciprocal": lambda p, o: (p.square() + 1).reciprocal(),
    "sin": lambda p, o: p.sin(),
    "cos": lambda p, o: p.cos(),
    "tanh": lambda p, o: p.tanh(),
    "sigmoid": lambda p, o: p.sigmoid(),
    "erf": lambda p, o: p.erf(),
    "relu": lambda p, o: p.relu(),
    "gelu": lambda p, o: F.gelu(p),
    "silu": lambda p, o: F.silu(p),
    "softplus": lambda p, o: F.softplus(p),
    "leaky_relu": lambda p, o: F.leaky_relu(p, 0.1),
    "elu": lambda p, o: F.elu(p),
    "clamp": lambda p, o: p.clamp(-0.5, 0.5),
    "clamp by tensors": lambda p, o: torch.clamp(p, min=-o.abs(), max=o.abs()),
    "maximum": lambda p, o: torch.maximum(p, o),
    "minimum": lambda p, o: torch.minimum(o, p),
    "where": lambda p, o: torch.where(o > 0, p, o),
    "lerp": lambda p, o: p.lerp(o, 0.3),
    "addcmul": lambda p, o: torch.addcmul(o, p, p, value=0.5),
    "addcdiv": lambda p, o: torch.addcdiv(p, o, p.square() + 1),
    "hypot": lambda p, o: torch.hypot(p, o),
    "atan2": lambda p, o: torch.atan2(p, o + 3),
    "masked_fill": lambda p, o: p.masked_fill(o > 0, 2.0),
    "nan_to_num": lambda p, o: p.nan_to_num(),
    "xlogy": lambda p, o: torch.xlogy(p.square(), o.square() + 1),
    "add by name": lambda p, o: torch.add(p, o, alpha=-0.1),
    "0-d beside": lambda p, o: p * torch.tensor(3.0, dtype=p.dtype),
    "itself twice": lambda p, o: p * p.detach(),
    "clone": lambda p, o: p.clone() * 2,
    "to": lambda p, o: p.to(torch.float32).to(torch.float64),
    "contiguous": lambda p, o: p.contiguous() * 1,
    "[:]": lambda p, o: p[:] * 1,
    "[...]": lambda p, o: p[...] * 1,
    "[None]": lambda p, o: p[None] * 1,
    "foreach_add": lambda p, o: torch._foreach_add([p, o], [o, p], alpha=2)[0],
    "foreach_mul": lambda p, o: torch._foreach_mul([p], 2.0)[0],
    "foreach_lerp": lambda p, o: torch._foreach_lerp([o], [p], 0.3)[0],
}
WHOLE = {
    "sum": lambda p, o: p.sum(),
    "mean": lambda p, o: p.mean(),
    "var": lambda p, o: p.var(unbiased=False),
    "std": lambda p, o: (p + o).std(unbiased=False),
    "prod": lambda p, o: p.prod(),
    "norm": lambda p, o: p.norm(),
    "norm 1": lambda p, o: p.norm(1),
    "norm inf": lambda p, o: p.norm(float("inf")),
    "vector_norm": lambda p, o: torch.linalg.vector_norm(p, 3),
    "foreach_norm": lambda p, o: torch._foreach_norm([p, o])[0],
    "norm of norms": lambda p, o: torch.stack([p.norm(), o.norm()]).norm(),
    "max": lambda p, o: p.max(),
    "min": lambda p, o: p.min(),
    "amax": lambda p, o: p.amax(),
    "logsumexp": lambda p, o: p.flatten().logsumexp(0),
    "dot": lambda p, o: torch.dot(p.flatten(), o.flatten()),
    "view(-1)": lambda p, o: p.view(-1) * 1,
    "reshape": lambda p, o: p.reshape(1, -1) * 1,
    "unsqueeze": lambda p, o: p.unsqueeze(0) * 1,
    "unsqueeze(-1)": lambda p, o: p.unsqueeze(-1) * 1,
    "flatten": lambda p, o: p.flatten() * 1,
    "ravel": lambda p, o: torch.ravel(p) + 1,
    "view_as": lambda p, o: p.view_as(o) * 1,
    "reshape_as": lambda p, o: p.reshape_as(o) * 1,
    "expand": lambda p, o: p.expand(2, *p.shape) * 1,
    "expand_as": lambda p, o: p.expand_as(o) * 1,
    "sort": lambda p, o: p.flatten().sort().values,
    "topk": lambda p, o: p.flatten().topk(1).values,
    "cumsum": lambda p, o: p.flatten().cumsum(0),
    "cumprod": lambda p, o: p.flatten().cumprod(0),
    "softmax": lambda p, o: p.flatten().softmax(0),
    "log_softmax": lambda p, o: p.flatten().log_softmax(0),
    "cat": lambda p, o: torch.cat([p.view(-1), o.view(-1)]),
    "stack": lambda p, o: torch.stack([p, o]),
    "to vector": lambda p, o: nn.utils.parameters_to_vector([p, o]),
    "mse_loss": lambda p, o: F.mse_loss(p, o),
    "l1_loss": lambda p, o: F.l1_loss(p, o),
    "smooth_l1_loss": lambda p, o: F.smooth_l1_loss(p, o),
    "huber_loss": lambda p, o: F.huber_loss(p, o),
    "cosine_similarity": lambda p, o: F.cosine_similarity(p.view(1, -1), o.view(1, -1)),
    "dist": lambda p, o: torch.dist(p, o),
    "outer": lambda p, o: torch.outer(p.flatten(), o.flatten()),
    "einsum": lambda p, o: torch.einsum("i,i->", p.flatten(), o.flatten()),
    "normalize": lambda p, o: F.normalize(p.view(1, -1)),
    "flip": lambda p, o: p.flatten().flip(0) * 1,
    "roll": lambda p, o: p.flatten().roll(1) * 1,
    "masked_select": lambda p, o: p.masked_select(o > 0),
    "broadcast to more": lambda p, o: p + o.expand(2, *o.shape),
    "meshgrid": lambda p, o: torch.meshgrid(p.flatten(), o.flatten(), indexing="ij")[0] * 1,
    "diff": lambda p, o: p.flatten().diff(),
    "logcumsumexp": lambda p, o: p.flatten().logcumsumexp(0),
    "renorm": lambda p, o: p.view(1, -1).renorm(2, 0, 0.5),
    "tensordot": lambda p, o: torch.tensordot(p.flatten(), o.flatten(), 1),
    "full_tensor": lambda p, o: (p.full_tensor() if hasattr(p, "full_tensor") else p) * 2,
}
ROWS = {
    "[0]": lambda p, o: p[0] * 1,
    "[-1]": lambda p, o: p[-1] * 1,
    "[1:]": lambda p, o: p[1:] * 1,
    "[list]": lambda p, o: p[[0, -1]] * 1,
    "sum(0)": lambda p, o: p.sum(0),
    "mean(-1)": lambda p, o: p.mean(-1),
    "softmax(0)": lambda p, o: p.softmax(0),
    "max(0)": lambda p, o: p.max(0).values,
    "cumsum(0)": lambda p, o: p.cumsum(0),
    "sort(0)": lambda p, o: p.sort(0).values,
    "split": lambda p, o: p.split(1)[-1] * 1,
    "chunk": lambda p, o: p.chunk(2)[0] * 1,
    "unbind": lambda p, o: p.unbind()[0] * 1,
    "iteration": lambda p, o: [*p][-1] * 1,
    "index_select": lambda p, o: p.index_select(0, torch.tensor([0])),
    "gather": lambda p, o: p.gather(0, torch.zeros(p.shape, dtype=torch.long)),
    "row beside": lambda p, o: p * o[:1],
    "cat p, p": lambda p, o: torch.cat([p, p]),
    "narrow": lambda p, o: p.narrow(0, 0, 1) * 1,
}
MATRICES = {
    "p @ o.T": lambda p, o: p @ o.T,
    "o.T @ p": lambda p, o: o.T @ p,
    "p.T": lambda p, o: p.T + 0,
    "mT": lambda p, o: p.mT * 2,
    "t()": lambda p, o: p.t() * 2,
    "transpose": lambda p, o: p.transpose(0, 1) * 2,
    "permute": lambda p, o: p.permute(1, 0) * 2,
    "linear": lambda p, o: F.linear(o, p),
    "addmm": lambda p, o: torch.addmm(o @ o.T, p, o.T),
    "matmul": lambda p, o: torch.matmul(p, o[0]),
    "softmax(1)": lambda p, o: p.softmax(1),
    "layer_norm": lambda p, o: F.layer_norm(p, p.shape[1:]),
    "cosine_similarity(1)": lambda p, o: F.cosine_similarity(p, o, dim=1),
    "tril": lambda p, o: p.tril(),
    "diagonal": lambda p, o: p.diagonal() * 1,
    "trace": lambda p, o: (p @ o.T).trace(),
    "norm(dim=1)": lambda p, o: p.norm(dim=1),
    "matrix_norm": lambda p, o: torch.linalg.matrix_norm(p),
    "det": lambda p, o: torch.linalg.det(p.T @ p + torch.eye(p.shape[1], dtype=p.dtype)),
    "inverse": lambda p, o: torch.linalg.inv(p.T @ p + torch.eye(p.shape[1], dtype=p.dtype)),
    "[:, 0]": lambda p, o: p[:, 0] * 1,
    "column beside": lambda p, o: p * o[:, :1],
    "vector beside": lambda p, o: p * o[0],
    "flatten(1)": lambda p, o: p.unsqueeze(1).flatten(1) * 2,
    "pad": lambda p, o: F.pad(p, (1, 1)),
    "embedding": lambda p, o: F.embedding(torch.tensor([0, 0]), p),
    "cdist": lambda p, o: torch.cdist(p, o + 3),
    "bmm": lambda p, o: torch.bmm(p[None], o.T[None]),
    "kron": lambda p, o: torch.kron(p, o[:1]),
}
# Without derivatives.
VALUES = {
    "norm().item()": lambda p, o: p.norm().item(),
    "max().item()": lambda p, o: p.max().item(),
    "float(sum)": lambda p, o: float(p.sum()),
    "isnan.any": lambda p, o: bool(torch.isnan(p).any()),
    "isfinite.all": lambda p, o: torch.isfinite(p).all().item(),
    "p > 0": lambda p, o: (p > 0).sum(),
    "p == o": lambda p, o: (p == o) | (p >= o),
    "equal": lambda p, o: torch.equal(p, o),
    "equal itself": lambda p, o: torch.equal(p, p.clone()),
    "allclose": lambda p, o: torch.allclose(p, p * (1 + 1e-12)),
    "isclose": lambda p, o: torch.isclose(p, o),
    "argmax": lambda p, o: p.argmax(),
    "argsort": lambda p, o: p.flatten().argsort(),
    "median": lambda p, o: p.median(),
    "quantile": lambda p, o: p.quantile(0.3),
    "unique": lambda p, o: p.sign().unique(),
    "histc": lambda p, o: p.histc(4, -2, 2),
    "nonzero": lambda p, o: p.flatten().nonzero(),
    "where(condition)": lambda p, o: torch.where(p.view(-1) > 0)[0],
    "count_nonzero": lambda p, o: p.count_nonzero(),
    "sign": lambda p, o: p.sign(),
    "floor": lambda p, o: p.floor() + p.ceil() + p.round() + p.trunc(),
    "floor_divide": lambda p, o: p // 0.3,
    "remainder": lambda p, o: p % 0.3,
    "frexp": lambda p, o: torch.frexp(p)[0],
    "int": lambda p, o: (p * 10).int() & 3,
    "half": lambda p, o: p.half().float(),
    "bfloat16": lambda p, o: p.bfloat16().double(),
    "tolist": lambda p, o: p.detach().tolist(),
    "len, shape": lambda p, o: [*p.shape, p.dim(), p.numel(), p.ndim, p.nelement(), *p.size(), *p.stride(), p.nbytes],
    "dtype": lambda p, o: str((p.dtype, p.device, p.is_floating_point(), p.layout, p.is_contiguous())),
    "zeros_like": lambda p, o: torch.zeros_like(p) + torch.ones_like(p) * torch.full_like(p, 3.0),
    "empty_like": lambda p, o: torch.empty_like(p).fill_(2.0),
    "new_zeros": lambda p, o: p.new_zeros(3) + p.new_tensor([1.0, 2.0, 3.0]),
    "rand_like": lambda p, o: (torch.manual_seed(1), torch.rand_like(p) + torch.randn_like(p))[1],
    "bernoulli": lambda p, o: (torch.manual_seed(1), torch.bernoulli(p.sigmoid()))[1],
    "dropout": lambda p, o: (torch.manual_seed(1), F.dropout(p, 0.5))[1],
    "multinomial": lambda p, o: (torch.manual_seed(1), p.flatten().exp().multinomial(1))[1],
    "deepcopy": lambda p, o: copy.deepcopy(p) * 2,
    "data": lambda p, o: p.data.norm(),
    "out=": lambda p, o: torch.mul(p, o, out=torch.empty_like(o)),
    "out= of its own": lambda p, o: torch.mul(p, o, out=torch.zeros_like(p)),
    "add into plain": lambda p, o: o.clone().add_(p, alpha=2),
    "copy into plain": lambda p, o: o.clone().copy_(p),
    "foreach_add_ into plain": lambda p, o: (x := o.clone(), torch._foreach_add_([x], [p]), x)[2],
    "clip_grad_norm_": lambda p, o: clipped(p),
    "total norm": lambda p, o: torch.nn.utils.get_total_norm([p, o]),
    "scaled by norms": lambda p, o: p * (1.0 / (p.norm() + 1e-6)).clamp(max=1.0),
    "norm by a norm": lambda p, o: (p.norm() / o.norm()).sqrt() + 1,
    "format": lambda p, o: f"{p.sum():.4f} {p.norm():.4f}",
    "svdvals": lambda p, o: torch.linalg.svdvals(p.view(1, -1)),
    "searchsorted": lambda p, o: torch.searchsorted(torch.arange(-3.0, 3.0, dtype=p.dtype), p.contiguous()),
    "bincount": lambda p, o: torch.bincount((p.flatten() > 0).long(), minlength=2),
    "complex": lambda p, o: (p * 1j).abs(),
    "logical": lambda p, o: torch.logical_and(p > 0, o > 0) ^ (p > o),
    "is_same_size": lambda p, o: p.is_same_size(o),
    "arange": lambda p, o: torch.arange(p.shape[0] if p.dim() else 1),
}


def clipped(p):
    q = nn.Parameter(torch.zeros(()))
    q.grad, x = torch.ones((), dtype=q.dtype), p.detach().clone()
    scale = torch.clamp(0.5 / (torch.linalg.vector_norm(torch.stack([x.norm()])) + 1e-6), max=1.0)
    return x.mul_(scale)


def item(fn):
    def run(p, o):
        fn(p, o)
        return p

    return run


def _steps(p, make):
    """Two steps of an optimizer of torch on `p`, or on a parameter of its own where `p` is plain."""
    q = nn.Parameter(p.detach().clone()) if type(p) is torch.Tensor else p
    q.requires_grad_()
    optimizer = make([q])
    for i in range(2):
        q.grad = torch.full_like(q, 0.5 + i) * q.detach()
        optimizer.step()
    with torch.no_grad():
        p.copy_(q)
    q.requires_grad_(False)


def _adamw(p, o, **options):
    _steps(p, lambda params: torch.optim.AdamW(params, 0.1, **options))


def _sgd(p, o, **options):
    _steps(p, lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True, **options))


def _drawn(fn):
    def run(p, o):
        torch.manual_seed(3)
        fn(p, o)

    return run


def _mask(p, o):
    p[p > 0] = 0.5


def _half(p, o):
    p[o > 0] = 0.5


def _data(p, o):
    p.data = o.clone()
    p.data = p.data * 2
    p.data.add_(1)


def _kept(p, o):
    kept = p.data
    p.data = o.clone()
    p.data.mul_(3)
    p.data = kept


WRITES = {
    name: item(fn)
    for name, fn in {
        "mul_": lambda p, o: p.mul_(0.5),
        "add_": lambda p, o: p.add_(o, alpha=2),
        "sub_ itself": lambda p, o: p.sub_(p.clone() * 0.5),
        "copy_": lambda p, o: p.copy_(o),
        "copy_ of a number": lambda p, o: p.copy_(torch.tensor(2.0, dtype=p.dtype)),
        "clamp_": lambda p, o: p.clamp_(-0.5, 0.5),
        "lerp_": lambda p, o: p.lerp_(o, 0.1),
        "addcmul_": lambda p, o: p.addcmul_(o, p.clone(), value=0.3),
        "addcdiv_": lambda p, o: p.addcdiv_(o, p.square() + 1, value=0.3),
        "+=": lambda p, o: p.__iadd__(o),
        "*=": lambda p, o: p.__imul__(2),
        "zero_": lambda p, o: p.zero_(),
        "fill_": lambda p, o: p.fill_(2.0),
        "masked_fill_": lambda p, o: p.masked_fill_(o > 0, 7.0),
        "[:] = ": lambda p, o: p.__setitem__(slice(None), o),
        "[...] = ": lambda p, o: p.__setitem__(..., 2.0),
        "mask of its own": _mask,
        "mask": _half,
        "normal_": _drawn(lambda p, o: p.normal_()),
        "uniform_": _drawn(lambda p, o: p.uniform_(-1, 1)),
        "bernoulli_": _drawn(lambda p, o: p.bernoulli_(0.5)),
        "init.normal_": _drawn(lambda p, o: nn.init.normal_(p, 0.0, 0.02)),
        "init.trunc_normal_": _drawn(lambda p, o: nn.init.trunc_normal_(p)),
        "init.constant_": lambda p, o: nn.init.constant_(p, 3.0),
        "put_": lambda p, o: p.put_(torch.tensor([0]), torch.ones(1, dtype=p.dtype)),
        "data": _data,
        "data and back": _kept,
        "set to a norm": lambda p, o: p.mul_(p.norm()).div_(o.norm()),
        "foreach_mul_": lambda p, o: torch._foreach_mul_([p], 2.0),
        "foreach_add_": lambda p, o: torch._foreach_add_([p], [o], alpha=0.5),
        "foreach_copy_": lambda p, o: torch._foreach_copy_([p], [o]),
        "foreach_lerp_": lambda p, o: torch._foreach_lerp_([p], [p.clone() * 2], 0.5),
        "out=": lambda p, o: torch.mul(p, o, out=p),
        "out= of a sum": lambda p, o: torch.cumsum(o.view(-1), 0).view_as(o).mul(p.clone(), out=p),
        "AdamW": lambda p, o: _adamw(p, o, foreach=False),
        "AdamW, foreach": lambda p, o: _adamw(p, o, foreach=True),
        "AdamW, fused": lambda p, o: _adamw(p, o, fused=True),
        "SGD": lambda p, o: _sgd(p, o, foreach=False),
        "SGD, foreach": lambda p, o: _sgd(p, o, foreach=True),
        "SGD, fused": lambda p, o: _sgd(p, o, fused=True),
        "sigmoid_": lambda p, o: p.sigmoid_().sub_(0.5).neg_().exp_(),
        "nan_to_num_": lambda p, o: p.div_(0.0).nan_to_num_(1.0, 2.0, 3.0),
        "detach().mul_": lambda p, o: p.detach().mul_(2),
        "view_as().copy_": lambda p, o: p.view_as(o).copy_(o),
    }.items()
}
WRITES_OF_ROWS = {
    name: item(fn)
    for name, fn in {
        "[0] = ": lambda p, o: p.__setitem__(0, 0.0),
        "[-1] = o[0]": lambda p, o: p.__setitem__(-1, o[0]),
        "cumsum_": lambda p, o: p.cumsum_(0),
        "index_fill_": lambda p, o: p.index_fill_(0, torch.tensor([0]), 2.0),
        "index_add_": lambda p, o: p.index_add_(0, torch.tensor([0]), o[:1]),
        "index_copy_": lambda p, o: p.index_copy_(0, torch.tensor([0]), o[:1]),
        "cumsum, out= itself": lambda p, o: torch.cumsum(p, 0, out=p),
        "row added": lambda p, o: p.add_(o[:1]),
        "renorm_": lambda p, o: p.mul_(2) if p.dim() == 1 else p.renorm_(2, 0, 0.1),
    }.items()
}
WRITES_OF_MATRICES = {
    name: item(fn)
    for name, fn in {
        "[:, 0] = ": lambda p, o: p.__setitem__((slice(None), 0), 7.0),
        "kaiming_uniform_": _drawn(lambda p, o: nn.init.kaiming_uniform_(p, a=math.sqrt(5))),
        "xavier_normal_": _drawn(lambda p, o: nn.init.xavier_normal_(p)),
        "orthogonal_": _drawn(lambda p, o: nn.init.orthogonal_(p)),
        "tril_": lambda p, o: p.tril_(),
        "addmm_": lambda p, o: p.addmm_(o @ o.T, p.clone()),
        "fill_diagonal_": lambda p, o: p.fill_diagonal_(2.0),
        "column added": lambda p, o: p.add_(o[:, :1]),
    }.items()
}
DIFFERENTIABLE = {**EACH, **WHOLE}
