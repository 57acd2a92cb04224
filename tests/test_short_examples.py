"""The short examples do what their pages say, with fewer steps; and pages show what stands in them."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from time_limits import limit
from torch.func import grad

import zerofn as zf

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture
def example(monkeypatch):
    """The examples as modules, found as Python finds them when it runs one."""
    for folder in ("ddp", "optimizers", "research", ""):
        monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    return importlib.import_module


def test_a_first_model_that_is_cut_off_goes_on_bit_for_bit(example, tmp_path):
    run = example("first_model").main
    straight, score = run(["--out", str(tmp_path / "straight"), "--epochs", "3"])
    run(["--out", str(tmp_path / "cut"), "--epochs", "1"])
    resumed, again = run(["--out", str(tmp_path / "cut"), "--epochs", "3"])
    assert [row[1:] for row in resumed] == [row[1:] for row in straight] and again == score > 0.5
    assert run(["--out", str(tmp_path / "cut"), "--epochs", "3", "--patience", "1"])[1] == score
    # A score that cannot become better ends the run.
    log = tmp_path / "cut" / "log.csv"
    log.write_text(re.sub(r"(?m)^0,(.*),.*$", r"0,\1,2.0", log.read_text()))
    assert len(run(["--out", str(tmp_path / "cut"), "--epochs", "9", "--patience", "3"])[0]) == 4


def on_two_ranks(folder):
    sys.path[:0] = [str(EXAMPLES / "ddp"), str(EXAMPLES)]
    import after
    import before
    import lora
    import sam

    runs = [module.main(3, f"{folder}/{module.__name__}") for module in (before, after)]
    return runs, lora.train(2, 3), sam.by_backward(sam.model(), sam.chain(sam.RHO), sam.data()[0], 3)


def test_what_runs_on_two_ranks(example, tmp_path):
    """DDP and the chain give the same losses and norms; LoRA trains adapters alone; SAM is that of one process."""
    found = zf.launch(on_two_ranks, 2, str(tmp_path), timeout=limit())
    for (ddp, ours), _, _ in found:
        assert ours[0] == pytest.approx(ddp[0], rel=1e-5) and ours[1] == pytest.approx(ddp[1], rel=1e-4)
    assert found[0][0][0][0] != found[1][0][0][0], "each rank has data of its own"
    (before, after, adapters), (_, _, other) = found[0][1], found[1][1]
    names = {name for name, _ in example("lora").adapted(1).named_parameters() if re.search(r"\.[ab]$", name)}
    assert after < before and adapters.keys() == names
    for name, p in adapters.items():
        torch.testing.assert_close(other[name], p, rtol=0, atol=0)
    sam = example("sam")
    alone = sam.by_functions(sam.model(), sam.chain(sam.RHO), sam.data()[0], 3)
    torch.testing.assert_close(found[0][2], alone, rtol=1e-4, atol=1e-5)


def test_sam(example):
    """Both routes give the same parameters, which are those of the two gradients by hand and torch.optim."""
    sam = example("sam")
    found = sam.main(["--steps", "3"])
    torch.testing.assert_close(found["by_backward", sam.RHO][0], found["by_functions", sam.RHO][0])
    net = sam.model()
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for x, y in sam.batches(sam.data()[0], 3):
        params = dict(net.named_parameters())
        loss = lambda params: sam.cross_entropy(sam.functional_call(net, params, (x,)), y)  # noqa: B023, E731
        g = grad(loss)({name: p.detach() for name, p in params.items()})
        norm = torch.cat([t.flatten() for t in g.values()]).norm()
        g = grad(loss)({name: p.detach() + sam.RHO * g[name] / norm for name, p in params.items()})
        for name, p in params.items():
            p.grad = g[name]
        optimizer.step()
    torch.testing.assert_close(found["by_backward", sam.RHO][0], params, rtol=1e-4, atol=1e-6)
    assert not torch.equal(found["by_backward", 0.0][0]["0.weight"], found["by_backward", sam.RHO][0]["0.weight"])


def test_groups_that_seldom_talk(example):
    found = example("diloco").main(["--steps", "60"])
    assert found[True][0] > 0.6 and found[False][0] > 0.6
    # Three outer steps of 9610 parameters in two bytes, and what `attach` and `detach` say.
    assert 3 * 9610 * 2 <= found[True][1] < 3 * 9610 * 2 + 100 < found[False][1] / 30


def test_large_batches(example):
    found = example("large_batch").main(["--steps", "20"])
    assert all(loss < 2.2 for losses in found.values() for loss in losses.values())  # 2.3 is a guess among ten
    free = found["schedule_free_adamw"]
    assert free["average"] != free["last weights"]


def test_update_ratios(example, tmp_path):
    seen = example("update_ratios").main(["--steps", "4", "--out", str(tmp_path / "ratios.png")])
    assert (tmp_path / "ratios.png").read_bytes()[:4] == b"\x89PNG"
    median = {name: sorted(values)[2] for name, values in seen.items()}
    assert min(median, key=median.get) == "blocks.1.up" and max(median, key=median.get) == "blocks.0.up"


def test_optimizers_side_by_side(example, tmp_path, capsys):
    """AdamW is torch's, in 8 bits it learns the same with a third of the state, and the others learn otherwise."""
    module = example("compare")
    found = module.main(["--steps", "10", "--width", "16", "--out", str(tmp_path / "losses.png")])
    assert (tmp_path / "losses.png").read_bytes()[:4] == b"\x89PNG"
    last = {name: runs[0][10] for name, runs in found.items()}
    torch.manual_seed(1)
    model, text = module.GPT(16, layers=2, heads=2, seq=module.SEQ), module.Text.split(module.read_text(None), 64)
    rate, rate_at = module.RATES["AdamW"], zf.schedules.warmup_cosine(module.RATES["AdamW"], 1, 10)
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.99), weight_decay=0.1)
    for step in range(1, 11):
        x, y = text.batch(1, step, 16, 64)
        module.next_byte_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate_at(step - 1)
        optimizer.step()
        optimizer.zero_grad()
    assert last["AdamW"] == pytest.approx(module.validate(model, text), rel=1e-5)
    assert last["8-bit AdamW"] == pytest.approx(last["AdamW"], abs=0.02) and len(set(last.values())) == 5
    state = [float(line.split()[-2]) for line in capsys.readouterr().out.splitlines()[1:]]
    # Two moments, in codes; three numbers; two, or one in the blocks; two, and two squares for each side of a matrix.
    assert state[0] == pytest.approx(8, abs=0.1) and state[1] < 3.2 and state[2] == pytest.approx(12, abs=0.1)
    assert 4 < state[3] < 8 < 12 < state[4]


def test_fine_tuning(example):
    """A window of answers of other lengths is one batch of all their tokens."""
    module = example("fine_tune")
    before, last, averaged = module.main(["--base", "2", "--steps", "3"])
    assert last < before and averaged < before and averaged != last
    rows, model = module.pairs()[:8], example("lm_base").base(1)
    opt = zf.attach(model, zf.chain(zf.accumulate(2, weighted=True), zf.sgd(1.0)))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for part in (rows[:3], rows[3:]):
        loss, tokens = module.loss_of(model, part)
        loss.backward()
        opt.step(weight=tokens)
        opt.zero_grad()
    whole = example("lm_base").base(1)
    module.loss_of(whole, rows)[0].backward()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(start[name] - p, q.grad, rtol=1e-4, atol=1e-5)


def test_plain_autograd(example):
    """Its meta-gradient is the one of torch.func; and it learns both."""
    module, maml = example("plain_autograd"), example("maml")
    params, batch = maml.first_params(dtype=torch.float64), maml.tasks(3, 5, torch.Generator(), dtype=torch.float64)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    pairs = list(zip(*batch, strict=True))
    sum(maml.mse(module.adapted(leaves, 0.02, x, y), x2, y2) for x, y, x2, y2 in pairs).div(3).backward()
    want = grad(maml.meta_loss)(params, batch)
    torch.testing.assert_close({name: p.grad for name, p in leaves.items()}, want, rtol=1e-10, atol=1e-12)
    _, rate, losses = module.train(25, count=2)
    assert abs(rate - 0.0183) > 1e-3 and all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_an_ensemble_in_one_step(example, backend):
    """Each member is what it is alone by torch.optim, at its own rate."""
    module = example("ensemble")
    rates = torch.tensor([1e-3, 1e-1])
    starts, xs, params, losses, _ = module.compiled_sweep(rates, 6, backend=backend)
    for i, rate in enumerate(rates.tolist()):
        leaves = {name: p.clone().requires_grad_() for name, p in starts[i].items()}
        optimizer = torch.optim.Adam(leaves.values(), rate)
        for t, x in enumerate(xs):
            loss = module.loss(leaves, x, module.truth(x))
            torch.testing.assert_close(losses[i, t], loss.detach(), rtol=1e-4, atol=1e-6)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, p in leaves.items():
            torch.testing.assert_close(params[name][i], p.detach(), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- pages


def test_what_a_page_shows_of_a_script_stands_in_it():
    """A block whose first line names a script is a part of that script, moved to the left."""
    seen = 0
    for page in PAGES:
        for name, block in re.findall(r"```python no-run\n# (examples/[\w/]+\.py)\n(.*?)```", page.read_text(), re.S):
            source = (ROOT / name).read_text()
            for part in re.split(r"^ *# \.\.\.\n", block, flags=re.M):
                indents = [textwrap.indent(part, " " * n).strip("\n") for n in (0, 4, 8, 12, 16)]
                assert any(part in source for part in indents), f"{page.name}: {part}"
                seen += 1
    assert seen > 5


def test_the_difference_that_is_shown_is_that_of_the_scripts():
    before, after = ((EXAMPLES / "ddp" / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    start = [lines.index("STEPS, WINDOW, BATCH, SEQ, RATE = 60, 2, 8, 64, 3e-3") + 3 for lines in (before, after)]
    lines = difflib.unified_diff(before[start[0] :], after[start[1] :], n=2, lineterm="")
    want = "\n".join(line.rstrip() for line in lines if not line.startswith(("---", "+++", "@@"))).strip("\n")
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/how-to/gpt-from-ddp.md").read_text(), re.S)
    assert shown.strip("\n") == want
