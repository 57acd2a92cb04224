"""Combinations of dtypes, stages and placements train as float64 does, or are refused; and bad input around them.

`ZEROFN_MATRIX=all` trains every one that is not refused, instead of a choice of them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path

import precision_matrix as matrix
import pytest
import torch
from gone_gradients import is_gone
from precision_matrix import AXES, BYTES, CODES, DTYPES, IN_STATE, SPLIT, STEPS, Cell
from time_limits import limit

import zerofn as zf
from zerofn.core.tree import flatten  # inside: states in the order of the layout

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PAGE = Path(__file__).parents[2] / "docs" / "precision.md"
EVERY = os.environ.get("ZEROFN_MATRIX") == "all"
AT_ONCE = 600  # cells in one launch


# ---- the matrix ----


# Any two values that can meet do so in each run of the tests, any three in the slow ones.
@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def strength(request):
    return request.param


@pytest.fixture(scope="module")
def cells(strength):
    return [c for c in matrix.every_cell() if matrix.refusal(c) is None] if EVERY else matrix.covering(strength)


@pytest.fixture(scope="module")
def results(cells):
    """For each cell what each of two ranks found."""
    found = {}
    for begin in range(0, len(cells), AT_ONCE):
        part = cells[begin : begin + AT_ONCE]
        per_rank = zf.launch(matrix.run_cells, matrix.RANKS, part, timeout=limit(120))
        found.update(zip(part, zip(*per_rank, strict=True), strict=True))
        print(f"{len(found):,} of {len(cells):,} cells", flush=True)
    return found


@pytest.fixture(scope="module")
def references():
    return {stored: matrix.reference(stored) for stored in AXES["stored"]}


def test_values_that_can_meet_do_meet(cells, strength):
    """Counted over the full product, independently of how the cells were chosen."""
    possible = {c: None for c in matrix.every_cell() if matrix.refusal(c) is None}
    names = list(AXES)
    for axes in itertools.combinations(range(len(names)), strength):
        missing = {tuple(c[i] for i in axes) for c in possible} - {tuple(c[i] for i in axes) for c in cells}
        assert not missing, f"{[names[i] for i in axes]}: {missing}"
    assert all(c in possible for c in cells) and len(set(cells)) == len(cells)
    total = sum(1 for _ in matrix.every_cell())
    print(f"\n{total:,} combinations: {total - len(possible):,} refused, {len(cells)} of the others trained")


@pytest.mark.timeout(3600 if EVERY else 300)
def test_every_cell_changes_parameters_as_float64_does(results, references):
    bad = []
    for cell, ranks in results.items():
        for leaf, expected in references[cell.stored].items():
            off = float((ranks[0]["change"][leaf] - expected).abs().max())
            if not off <= matrix.bound(cell):
                bad.append(f"{leaf}: off by {off:.2e}, bound {matrix.bound(cell):.2e}, in {cell}")
    assert not bad, "\n".join(bad)


def test_bounds_would_show_a_wrong_gradient(cells, references):
    """The widest bound is far below a change; a gradient doubled or halved changes more than any bound allows."""
    assert all(float(x.abs().max()) > 0.08 for ref in references.values() for x in ref.values())
    assert max(map(matrix.bound, cells)) < 0.03
    assert sorted(map(matrix.bound, cells))[len(cells) // 2] < 0.02


def test_every_cell_on_every_rank(results):
    """Both ranks hold the same parameters, every leaf was alive, every step counted, every dtype as asked."""
    leaves = {name for name, _ in matrix.EveryKindOfLeaf().named_parameters()}
    for cell, ranks in results.items():
        assert all(torch.equal(ranks[0]["change"][k], ranks[1]["change"][k]) for k in leaves), cell
        assert set.union(*(r["alive"] for r in ranks)) == leaves, cell
        for r in ranks:
            assert (r["updates"], r["skipped"]) == (STEPS, 0), cell
            expected = {"stored": {IN_STATE[cell.stored]}, "gradients": {DTYPES[cell.gradients]}}
            # Codes of matrices and their scales; biases stay as they are.
            expected["moments"] = {torch.uint8, F32} if cell.moments in CODES else {DTYPES[cell.moments]}
            assert r["dtypes"] == expected, cell


@pytest.mark.parametrize("moments", AXES["moments"])
@pytest.mark.parametrize("rounding", AXES["rounding"])
@pytest.mark.parametrize("stored", AXES["stored"])
def test_refused_cells(stored, moments, rounding):
    """Only these three axes decide; the error says which values, on which leaves, and what to write."""
    first = {axis: values[0] for axis, values in AXES.items()}
    cell = Cell(**{**first, "stored": stored, "moments": moments, "rounding": rounding})

    def build():
        return zf.init(matrix.pipeline(cell), dict(matrix.EveryKindOfLeaf().named_parameters()))

    if (refused := matrix.refusal(cell)) is None:
        build()
        return
    with pytest.raises(ValueError, match=refused[0]) as error:
        build()
    assert "write: " in str(error.value)


# ---- what is kept ----


def one_step(stored, gradients, moments, rounding, **attach):
    torch.manual_seed(0)
    first, last = torch.nn.Linear(128, 128, bias=False), torch.nn.Linear(128, 8, bias=False)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), last)
    inside = IN_STATE[stored]
    store = SPLIT if stored == SPLIT else inside
    dtypes = zf.precision(store_dtype=store, param_dtype=inside, grad_dtype=DTYPES[gradients])
    opt = zf.attach(model, zf.chain(dtypes, matrix.optimizer(moments, rounding, 1e-3)), **attach)
    model(torch.randn(4, 128, dtype=inside)).float().square().mean().backward()
    return model, opt


@pytest.mark.parametrize("rounding", AXES["rounding"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", *CODES])
@pytest.mark.parametrize(("stored", "gradients"), list(itertools.product(AXES["stored"], DTYPES)))
def test_bytes_per_parameter_are_those_of_the_table(stored, gradients, moments, rounding):
    """Every tensor that is kept, counted by storage: a second copy anywhere would show."""
    first = {axis: values[0] for axis, values in AXES.items()}
    if matrix.refusal(Cell(**{**first, "stored": stored, "moments": moments, "rounding": rounding})):
        return
    model, opt = one_step(stored, gradients, moments, rounding)
    kept = [*model.parameters(), *(p.grad for p in model.parameters()), *flatten(opt.state)[0]]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept if x.ndim}
    count = sum(p.numel() for p in model.parameters())
    assert sum(storages.values()) == count * matrix.state_bytes(stored, gradients, moments, rounding)


@pytest.mark.parametrize(("moments", "size"), [("bf16", 8), ("8 bits", 6 + 1 / 16), ("4 bits", 5 + 1 / 16)])
def test_bytes_of_bf16_parameters_and_two_less_in_backward(moments, size):
    assert matrix.state_bytes("bf16", "bf16", moments, "stochastic") == size
    model, opt = one_step("bf16", "bf16", moments, "stochastic", in_backward=True)
    assert all(is_gone(p) for p in model.parameters())
    kept = [*model.parameters(), *flatten(opt.state)[0]]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept if x.ndim}
    assert sum(storages.values()) == (size - BYTES["bf16"]) * sum(p.numel() for p in model.parameters())


def test_the_page_shows_this_table():
    shown = matrix.section(PAGE.read_text())
    assert shown == matrix.markdown(), "python tests/support/precision_matrix.py --write docs/precision.md"


# ---- bad input ----


def bf16_run(**adam):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    opt = zf.attach(model, zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(1e-2, **adam)))
    return model, opt


def test_fp32_states_do_not_slip_into_a_bf16_pipeline_and_the_way_shown_works(tmp_path):
    torch.manual_seed(1)
    old_model = torch.nn.Linear(3, 2)
    old_tx = zf.low_precision_adam(1e-2, state_dtype=F32, rounding="nearest")
    old = zf.attach(old_model, old_tx)
    old_model(torch.ones(1, 3)).sum().backward()
    old.step()
    trained = old_model.weight.detach().clone()
    saved = old.state_dict()
    zf.save(tmp_path / "run", old.state)

    model, opt = bf16_run()
    before = model.weight.detach().clone()
    text = r"params/weight: .*float32.* instead of .*bfloat16(.|\n)*dtypes are never changed silently(.|\n)*zf.attach"
    with pytest.raises(ValueError, match=text) as error:
        opt.load_state_dict(saved)
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match=r"float32 in the checkpoint, bfloat16 here(.|\n)*never changed silently"):
        zf.load(tmp_path / "run", like=opt.state)

    # The lines of the message, run as they stand.
    code = [line.strip() for line in str(error.value).splitlines() if line.startswith("         ")]
    scope = {"zf": zf, "model": torch.nn.Linear(3, 2), "old_tx": old_tx, "tx": opt.tx, "d": saved}
    exec("\n".join(code), scope)
    assert torch.equal(scope["model"].weight.detach(), trained.bfloat16())
    assert scope["opt"].state.leaves["weight"].dtype == BF16


# ---- fp16: overflow ----


def fp16_run(**scale):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    dtypes = zf.precision(store_dtype=F16, param_dtype=F16)
    return model, zf.attach(model, zf.chain(dtypes, zf.scale_loss(**scale), zf.low_precision_adam(1e-3)))


def overflow(model, opt, leaves):
    model(torch.ones(1, 4)).float().sum().backward()
    for name, p in model.named_parameters():
        if name in leaves:
            p.grad.view(-1)[-1] = leaves[name]
    opt.step()
    opt.zero_grad()


def test_the_first_leaf_that_overflowed_is_named_and_skipped_steps_are_counted():
    torch.manual_seed(0)
    model, opt = fp16_run(init_scale=8.0)
    before = [p.detach().clone() for p in model.parameters()]
    overflow(model, opt, {"1.weight": torch.inf, "0.bias": torch.nan})
    assert opt.overflow_leaf == "0.bias" and bool(opt.metrics["skipped"])
    assert opt.state.layout.leaves[int(opt.metrics["overflow_leaf"])].path == "0.bias"
    overflow(model, opt, {"1.weight": -torch.inf})
    assert opt.overflow_leaf == "1.weight" and opt.skipped_steps == 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    overflow(model, opt, {})
    assert opt.overflow_leaf is None and int(opt.metrics["overflow_leaf"]) == -1
    assert opt.skipped_steps == 2 and int(opt.state.step) == 1


def test_each_member_of_an_ensemble_names_its_own_leaf():
    tx = zf.chain(zf.scale_loss(init_scale=8.0), zf.sgd(0.1))
    states = [zf.init(tx, {"a": torch.ones(2), "b": torch.ones(3)}) for _ in range(3)]
    stacked = torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *states)
    grads = {"a": torch.ones(3, 2), "b": torch.ones(3, 3)}
    grads["b"][1, 2], grads["a"][2, 0] = torch.inf, torch.nan
    _, metrics = torch.func.vmap(lambda g, s: zf.update(tx, g, s))(grads, stacked)
    assert metrics["overflow_leaf"].tolist() == [-1, 1, 0]
    assert metrics["skipped"].tolist() == [False, True, True]


def overflow_on_one_rank(zero: str):
    import torch.distributed as dist

    road = {"0": [zf.all_reduce()], "3": [zf.shard()]}[zero]
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    tx = zf.chain(*road, zf.scale_loss(init_scale=2.0, min_scale=1.0), zf.sgd(1e-3))
    opt = zf.attach(model, tx)
    named, message = [], ""
    try:
        for _ in range(60):
            x = torch.full((1, 4), torch.inf if dist.get_rank() == 1 else 1.0)
            model(x).sum().backward()
            opt.step()
            opt.zero_grad()
            named.append(opt.overflow_leaf)
    except FloatingPointError as error:
        message = str(error)
    return named, message


@pytest.mark.parametrize("zero", ["0", "3"])
def test_all_ranks_name_the_same_leaf_and_give_up_together(zero):
    """The input of rank 1 is infinite: its outputs and the gradient of the first weight are."""
    one, other = zf.launch(overflow_on_one_rank, 2, zero, timeout=limit())
    assert one == other
    named, message = one
    assert set(named) == {"0.weight"}
    # One overflow brings the scale from 2 to its minimum; 50 more there are enough.
    assert len(named) == 50
    assert re.match(r"50 micro-steps in a row, the last being number 51, overflowed at .* minimum, 1\n", message)
    assert "gradient of 0.weight is not finite" in message and "write: a lower learning rate" in message


def test_a_static_scale_that_overflows_for_ever_is_an_error_too():
    torch.manual_seed(0)
    model, opt = fp16_run(scale=64.0)
    with pytest.raises(FloatingPointError, match=r"50 micro-steps in a row, the last being number 53, (.|\n)*0.bias"):
        for step in range(60):
            overflow(model, opt, {"0.bias": torch.inf} if step > 2 else {})
    assert opt.skipped_steps == 49


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("native", ["1", "0"])
def test_norms_of_leaves_longer_than_a_piece(dtype, bad, native, monkeypatch):
    """All ways through `norms`: the C kernel, leaves cut into pieces and whole ones; nothing bad is lost at an end."""
    from zerofn.kernels.norms import CHUNK, not_finite, squared_norm  # inside: a kernel by itself

    monkeypatch.setenv("ZEROFN_NATIVE", native)
    torch.manual_seed(0)
    leaves = {
        "long": torch.randn(2 * CHUNK + 3).to(dtype),
        "turned": torch.randn(5, 7).to(dtype).t(),
        "none": torch.ones(0),
    }
    if bad is not None:
        leaves["long"][-1] = bad
        assert torch.isnan(not_finite(leaves)) and not torch.isfinite(squared_norm(leaves))
        return
    assert float(not_finite(leaves)) == 0.0
    exact = [x.double() for x in leaves.values() if x.numel()]
    expected = float(sum((x * x).sum() for x in exact))
    # The C kernel sums in double and rounds to fp32 after; torch makes each sum of 2**17 squares in fp32.
    limit = 5e-7 if native == "1" and dtype is not F32 else 2e-5
    assert abs(float(squared_norm(leaves)) / expected - 1) < limit


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_largest_finite_numbers_are_no_overflow(dtype):
    from zerofn.kernels.norms import not_finite  # inside: a kernel by itself

    leaves = {"a": torch.full((70_000,), torch.finfo(dtype).max, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}
    assert float(not_finite(leaves)) == 0.0
    leaves["b"][1] = torch.inf
    assert torch.isnan(not_finite(leaves))


# ---- the benchmark that compares them ----


def test_loss_benchmark_keeps_what_it_has_and_pairs_by_seed(tmp_path, monkeypatch, capsys):
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples / "benchmarks"))
    monkeypatch.syspath_prepend(str(examples))
    import low_precision

    tiny = ["--steps", "3", "--d-model", "16", "--layers", "1", "--heads", "2", "--seq", "16", "--batch", "2"]
    command = ["loss", *tiny, "--out", str(tmp_path), "--only", "fp32 AdamW (torch.optim)", "bf16 states, kahan"]
    low_precision.main([*command, "--seeds", "0"])
    low_precision.main([*command, "--seeds", "0", "1"])
    shown = capsys.readouterr().out
    assert shown.count("seed 0, ") == 2 and shown.count("seed 1, ") == 2
    row = [line for line in shown.splitlines() if line.startswith("| bf16 states, kahan |")][-1]
    runs = json.loads((tmp_path / "loss.json").read_text())["runs"]
    gaps = [
        sum(a - b for a, b in zip(*(runs[k][s]["loss"] for k in reversed(runs)), strict=True)) / 3 for s in ("0", "1")
    ]
    assert " ".join(f"{g:+.4f}" for g in gaps) in row
    with pytest.raises(SystemExit, match="Give the same settings, or another --out"):
        low_precision.main([*command, "--lr", "1.0"])


def test_memory_benchmark_times_numbers_of_an_ordinary_size(monkeypatch):
    """Squares of gradients that are subnormal in fp32 (below 1e-38) take ten times as long to compute with."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
    from low_precision_memory import Model

    torch.manual_seed(0)
    model = Model(64, 64)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        assert min(float(p.grad.abs().median()) for p in model.parameters()) > 1e-6
        torch.optim.AdamW(model.parameters(), lr=1e-4).step()
