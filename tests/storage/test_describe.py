"""`describe` and `plan`: the table adds up, says the truth of every tensor, and is the same beforehand."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from transforms_table import ROWS, At, row_params

import zerofn as zf

BF16 = torch.bfloat16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.ones(0, 3))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].bias.requires_grad_(False)


def matrix(path):
    return path == "embed.weight" or path.endswith("w") or (path.startswith("blocks") and path.endswith("weight"))


def half(path):
    return "b" in path


MODEL = At(1e-2, matrix, half)
SMALL = {"w": torch.linspace(-1, 1, 6).view(3, 2), "bias": torch.linspace(-1, 1, 2)}


@pytest.mark.parametrize("name", row_params("laws", ROWS, 0, of=2))
def test_plan_is_describe_and_every_byte_is_counted(name):
    """Against a count that knows nothing of transforms: all tensors that torch's own tree library finds."""
    tx, model = ROWS[name].trained(MODEL), Model()
    planned = zf.plan(tx, model)
    named = OrderedDict(model.named_parameters(remove_duplicate=False))
    state = zf.init(tx, named)
    table = zf.describe(state)
    assert zf.plan(tx, named) == table
    tensors = [x for x in torch.utils._pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]
    assert table.bytes == sum(x.numel() * x.element_size() for x in tensors)
    assert len(table.rows) == len(tensors)
    assert sum(table.by_transform.values()) == table.bytes
    assert {"params", "state"} <= set(table.by_transform) <= {"params", "state", *state.transforms}
    assert table.parameters == 11 * 4 + 3 * 20 + 1
    opt = zf.attach(model, tx)
    assert planned == zf.describe(opt.state)
    # A state does not know its chain, of which the plan has the stations.
    assert str(planned).startswith(f"{zf.describe(opt.state)}\n\n")


@pytest.mark.parametrize("name", row_params("laws", ROWS, 1, of=2))
def test_nothing_changes_in_training_and_shapes_are_enough(name):
    """Law 7: what a state costs does not depend on its values."""
    row, tx = ROWS[name], ROWS[name].trained(MODEL)
    state, planned = zf.init(tx, SMALL), zf.plan(tx, SMALL)
    step = zf.make_step(lambda p, x: ((x.to(p["w"].dtype) @ p["w"] + p["bias"]) ** 2).mean().float(), tx)
    for i in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        state, _ = step(state, x, **({"weight": 2.0} if row.weighted else {}))
    assert zf.describe(state) == planned
    meta = {path: x.to("meta") for path, x in SMALL.items()}
    assert zf.plan(tx, meta) == zf.describe(zf.init(tx, meta))


@pytest.mark.parametrize("tx", [zf.adamw(1e-3), zf.chain(zf.accumulate(2), zf.sgd(0.1, 0.9), zf.ema(0.9))])
def test_a_nest_in_two_dtypes(tx):
    nest = {"a": [torch.ones(3), (torch.ones(2, 2),)], "b": torch.ones(5, dtype=torch.float64)}
    assert zf.plan(tx, nest) == zf.describe(zf.init(tx, nest))


def test_rows():
    tx = zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(1e-3, state_dtype=torch.float32))
    rows = zf.describe(zf.init(tx, {"b": torch.zeros(3), "a": [torch.zeros(2, 5)]})).rows
    name = "low_precision_adam"
    assert rows == (
        ("params", "", "a.0", (2, 5), (2, 5), BF16, "cpu", 20),
        ("params", "", "b", (3,), (3,), BF16, "cpu", 6),
        (name, "step", "", (), (), torch.int64, "cpu", 8),
        (name, "count", "a.0", (), (), torch.int64, "cpu", 8),
        (name, "count", "b", (), (), torch.int64, "cpu", 8),
        (name, "rounding_format", "", (), (), torch.int64, "cpu", 8),
        (name, "exp_avg", "a.0", (2, 5), (2, 5), torch.float32, "cpu", 40),
        (name, "exp_avg", "b", (3,), (3,), torch.float32, "cpu", 12),
        (name, "exp_avg_sq", "a.0", (2, 5), (2, 5), torch.float32, "cpu", 40),
        (name, "exp_avg_sq", "b", (3,), (3,), torch.float32, "cpu", 12),
        ("state", "step", "", (), (), torch.int64, "cpu", 8),
        ("state", "micro_step", "", (), (), torch.int64, "cpu", 8),
    )
    assert rows[0].path == "a.0"
    assert rows[0].local_shape == (2, 5)


@pytest.mark.parametrize("rounding, extra", [("nearest", 0), ("kahan", 2)])
def test_bytes_per_parameter(rounding, extra):
    """bf16 parameter, bf16 moments; and fp32 AdamW, whose 12 bytes the literature knows, with masters."""
    params = {"w": torch.empty(1000, 1000, device="meta")}
    low = zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(1e-3, rounding=rounding))
    assert zf.plan(low, params).bytes_per_parameter == pytest.approx(6 + extra, abs=1e-4)
    assert zf.plan(zf.adamw(1e-3), params).bytes_per_parameter == pytest.approx(12, abs=1e-4)


def test_plan_of_meta_tensors_allocates_nothing():
    """40 TiB of state: more than this machine has."""
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20, bias=False, dtype=torch.float64)
    tx = zf.chain(zf.accumulate(2), zf.adamw(1e-3), zf.ema(0.9))
    table = zf.plan(tx, model)
    assert table.bytes == 5 * (8 << 40) + 2 * 8 + 8 + 8 + 8 + 1
    assert "40.0 TiB" in str(table)
    small = {"w": torch.empty(3, 2, device="meta"), "bias": torch.empty(2, device="meta")}
    assert {row.device for row in zf.plan(zf.adamw(1e-3), small).rows if row.path and row.slot != "count"} == {"meta"}


def test_plan_pins_nothing():
    """State that is offloaded from a GPU is pinned on the host; a plan has no memory to pin."""
    from zerofn._compat.tensors import shape_only  # inside: what torch makes of shapes without numbers
    from zerofn.extend import Conveyor

    with shape_only() as fake:
        state = {"m": {"w": fake(torch.ones(3))}}
        assert Conveyor.laid_out(state, {"w": fake(torch.ones(3))}, pin=True) is state


def test_plan_leaves_its_arguments_alone():
    model = Model()
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    zf.plan(ROWS["everything"].trained(MODEL), model)
    for n, p in model.named_parameters():
        assert id(p) == before[n][0]
        assert torch.equal(p, before[n][1])
    assert type(torch.zeros(1)) is torch.Tensor
    zf.attach(model, zf.sgd(0.1))


def test_print():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)), nn.Linear(64, 1))
    text = str(zf.describe(zf.attach(model, zf.adamw(1e-3)).state))
    assert text == repr(zf.describe(zf.init(zf.adamw(1e-3), OrderedDict(model.named_parameters()))))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "path global shape local shape dtype device bytes"
    assert lines[1] == "params: 195.3 KiB"
    assert lines[2] == "{0..11}.weight x12 64 x 64 64 x 64 float32 cpu 192.0 KiB"
    assert lines[3] == "{0..11}.bias x12 64 64 float32 cpu 3.0 KiB"
    assert lines[4] == "12.weight 1 x 64 1 x 64 float32 cpu 256 B"
    assert "step - - int64 cpu 8 B" in lines
    assert "count x26 - - int64 cpu 208 B" in lines
    assert "exp_avg_sq {0..11}.weight x12 64 x 64 64 x 64 float32 cpu 192.0 KiB" in lines
    assert lines[-1] == "total: 586.0 KiB, 49,985 parameters, 12.00 bytes per parameter"


def test_a_wide_tree_stays_readable():
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "abcdefgh" for c in "abcdefgh"]
    params = {word: torch.zeros(i + 1) for i, word in enumerate(words)}
    params["x" * 200 + ".weight"] = torch.zeros(1)
    table = zf.describe(zf.init(zf.adamw(1e-3), params))
    text = str(table)
    assert len(table.rows) == 4 * 513 + 1 + 2
    assert len(text.splitlines()) < 50
    assert max(map(len, text.splitlines())) < 120
    assert "... 502 more" in text
