"""The code of the pages in `docs/` runs, from the first block to the last; the sharding on ranks as well."""

from __future__ import annotations

import inspect
import operator
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from time_limits import limit
from torch import nn
from torch.func import functional_call

import zerofn as zf

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LONGEST = 100


def run(text):
    """What the blocks of Python in a text define."""
    # As a script's: the compiler looks up by name the module that a function's globals belong to.
    main, page = sys.modules["__main__"], ModuleType("__main__")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    try:
        sys.modules["__main__"] = page
        exec(compile(code, "page", "exec", dont_inherit=True), vars(page))
    finally:
        sys.modules["__main__"] = main
    return vars(page)


def name_of(page):
    return str(page.relative_to(DOCS).with_suffix(""))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page.read_text())


def test_lines_of_pages_are_short():
    """A line that is longer than a window is not read. A row of a table holds one fact."""
    pages = [ROOT / "README.md", *PAGES]
    long = [
        f"{page.relative_to(ROOT)}:{number} has {len(line)}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > LONGEST and "--dist loadfile" not in line  # the test command, which is read as one line
    ]
    assert not long, long


def on_a_rank(folder):
    """The page that does not run, if there is one: ranks are not together behind it."""
    os.chdir(folder)
    for page in PAGES:
        try:
            run(page.read_text())
        except Exception as error:
            error.add_note(f"on the page {name_of(page)}")
            raise


def first_model(folder, *epochs):
    """The last row and the parameters of the script of the page, which is run for so many epochs, then for so many."""
    text = (DOCS / "first-model.md").read_text()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for stop in epochs:
        assert text.count("epochs = 10\n") == 1
        page = run(text.replace("epochs = 10\n", f"epochs = {stop}\n"))
    with page["opt"].gathered():
        return page["history"][-1], [p.detach().clone() for p in page["model"].parameters()]


def first_model_twice(folder):
    """On each rank: of a run without a stop, and of one that is stopped twice and goes on."""
    return first_model(folder / "whole", 10), first_model(folder / "stopped", 1, 5, 10)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_first_model_goes_on_with_the_same_bits_on_any_number_of_ranks(size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = first_model_twice(tmp_path / "one")
    found = [alone] if size == 1 else zf.launch(first_model_twice, size, tmp_path / "ranks", timeout=limit(60))
    for whole, stopped in found:
        assert stopped[0] == whole[0] and all(map(torch.equal, stopped[1], whole[1]))
        assert whole[0] == pytest.approx(alone[0][0], abs=1e-6)


def test_data_and_random_numbers_of_the_page_on_saving_follow_from_the_step(tmp_path, monkeypatch):
    """The page is stopped after a save in the middle of an epoch, and of a window of `accumulate`."""
    text = (DOCS / "saving.md").read_text().replace("zf.adamw(lr=1e-2)", "zf.accumulate(4), zf.adamw(lr=1e-2)")
    found = []
    for name, stops in {"whole": [None], "stopped": [8, None]}.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for stop in stops:
            code = text.replace(
                "        saves.save(opt)\n", f"        saves.save(opt)\n        if step == {stop}: break\n"
            )
            assert code != text
            page = run(code)
        assert page["step"] == 11
        found.append([p.detach().clone() for p in page["model"].parameters()])
    assert all(map(torch.equal, *found))


def test_arguments_and_defaults_of_the_page_on_chains_are_those_of_the_functions():
    written = (DOCS / "choosing.md").read_text().partition("```text\n")[2].partition("```")[0]
    right = ""
    for name in re.findall(r"^zf\.([\w.]+)", written, re.M):
        signature = inspect.signature(operator.attrgetter(name)(zf))
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        right += f"zf.{name}{inspect.Signature(bare)}"
    assert right and re.sub(r"\s", "", written).replace(",)", ")") == re.sub(r"\s", "", right)


@pytest.mark.slow
def test_every_block_runs_on_two_ranks(tmp_path):
    """As written, with nothing added: one page after the other."""
    zf.launch(on_a_rank, 2, str(tmp_path), timeout=limit(200))


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1, bias=False))


def batch(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def middle():
    return [zf.accumulate(2), zf.clip_by_global_norm(0.5), zf.adamw(1e-2)]


def by_rows(directory):
    """Parameters in full after six micro-steps, in both routes; and those of a checkpoint that was loaded again."""
    import torch.distributed as dist

    rank = dist.get_rank()
    shard_evenly = run((DOCS / "extend" / "wire.md").read_text())["shard_evenly"]
    tx, model = zf.chain(shard_evenly(), *middle()), model_of()
    state = zf.init(tx, {n: p.detach().clone() for n, p in model.named_parameters()})
    plain = model_of()
    step = zf.make_step(lambda p, x: functional_call(plain, p, (x,)).square().mean(), tx)
    opt = zf.attach(model, tx)
    parts = [tuple(p.to_local().shape) for p in model.parameters()]
    for i in range(6):
        model(batch(rank, i)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        state, _ = step(state, batch(rank, i))
    zf.save(directory, opt)
    again = zf.load(directory, like=zf.init(tx, {n: p.detach() for n, p in model_of().named_parameters()}))
    with opt.gathered():
        eager = {n: p.detach().clone() for n, p in model.named_parameters()}
    return parts, eager, zf.full_params(tx, state), zf.full_params(tx, again)


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sharding_of_ones_own_is_right_on_ranks(size, tmp_path):
    model = model_of()
    opt = zf.attach(model, zf.chain(*middle()))
    for i in range(6):
        model(torch.cat([batch(r, i) for r in range(size)])).square().mean().backward()
        opt.step()
        opt.zero_grad()
    for rank, (parts, *found) in enumerate(zf.launch(by_rows, size, str(tmp_path / "saved"), timeout=limit(60))):
        assert parts == [(len(torch.empty(n).chunk(size)[rank]),) for n in (35, 7, 7)]
        for params in found:
            for name, p in model.named_parameters():
                # The mean over ranks is taken in another order than over one batch.
                torch.testing.assert_close(params[name], p.detach(), rtol=1e-5, atol=1e-6)
