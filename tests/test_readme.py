"""The README's code runs, files and pages that are named exist, and it is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_of_python_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "block.py"
    path.write_text(BLOCKS[number])
    exec(compile(BLOCKS[number], str(path), "exec"), {"__name__": "__main__"})


def test_the_first_example_learns(capsys):
    exec(BLOCKS[0], {"__name__": "__main__"})
    first = capsys.readouterr().out.splitlines()[0]
    loss, steps, _ = first.split()
    # 200 micro-steps, four to an update; the targets have a variance of about 3.5.
    assert int(steps) == 50
    assert float(loss) < 1.0


def test_the_first_pipeline_is_one_for_bf16():
    """A loss scale and a cast of outputs make copies at the model's edge, which nobody with bf16 needs."""
    screen = README.partition("## Composition")[0].partition("```")[2]
    assert "bfloat16" in BLOCKS[0]
    assert not re.findall("scale_loss|output_dtype|float16", screen.replace("bfloat16", ""))


def test_the_first_example_is_short():
    code = [line for line in BLOCKS[0].splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= 30


def test_the_refusal_that_is_shown_is_the_one_raised():
    import zerofn as zf

    page = (ROOT / "docs" / "choosing.md").read_text()
    with pytest.raises(ValueError, match="clip_by_global_norm comes before all_reduce") as error:
        zf.chain(zf.clip_by_global_norm(1.0), zf.all_reduce(), zf.adamw(lr=1e-3))
    shown = re.findall(r"^# (.*)$", page.partition("print(error)")[2].partition("```")[0], re.M)
    told = str(error.value).splitlines()
    for line, real in zip(shown, told, strict=True):
        assert real.startswith(line.removesuffix(" ..."))


def anchors(text):
    """What GitHub and the site make of headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.stem)
def test_files_that_pages_name_exist(page):
    text = page.read_text()
    for name in re.findall(r"(?:examples|notebooks|tests)/[\w./]+\.(?:py|ipynb)", text):
        assert (ROOT / name).is_file(), name
    for link, anchor in re.findall(r"\]\(([\w./-]+\.md)(#[\w.-]+)?\)", text):
        target = page.parent / link
        assert target.is_file(), link
        assert not anchor or anchor[1:] in anchors(target.read_text()), link + anchor


def test_it_is_short():
    assert len(README.splitlines()) <= 120
    text = re.sub(r"```.*?```", "", README, flags=re.S)
    assert len(text.split()) <= 700
