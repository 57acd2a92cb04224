"""What the site has beside its pages is complete. That the site is built is seen by `.ci/run`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import zerofn as zf

ROOT = Path(zf.__file__).parent.parent


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference(site):
    return site.reference()


def entries(pages):
    """The name of each entry, and the page that has it."""
    return {name: page for page, text in pages.items() for name in re.findall(r"^(?:::: |## `)([\w.]+)", text, re.M)}


def test_every_public_name_has_an_entry(reference):
    found = entries(reference)
    for name in zf.__all__:
        value = getattr(zf, name)
        if isinstance(value, ModuleType):
            names = getattr(value, "__all__", None) or [n for n in dir(value) if n in found]
            missing = [n for n in names if f"{value.__name__}.{n}" not in found]
            assert f"api/{name}.md" in reference and not missing, (name, missing)
        else:
            assert f"zerofn.{name}" in found, name


def test_a_name_without_an_entry_is_seen(reference):
    found = entries({page: text.replace("::: zerofn.adamw\n", "") for page, text in reference.items()})
    assert "zerofn.adamw" in entries(reference) and "zerofn.adamw" not in found


def test_every_entry_says_something(reference):
    for page, text in reference.items():
        for name, rest in re.findall(r"^## `([\w.]+)`.*\n\n(.*)", text, re.M):
            assert rest, f"{page}: {name} has neither a docstring nor a line in docs/extend/names.md"


def in_nav(nav):
    for item in nav:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        if isinstance(value, list):
            yield from in_nav(value)
        else:
            yield value


def test_the_menu_has_every_page(reference):
    listed = list(in_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    docs = ROOT / "docs"
    pages = {str(p.relative_to(docs)) for kind in ("md", "ipynb") for p in docs.rglob(f"*.{kind}")}
    assert sorted(listed) == sorted(pages | reference.keys() | {"errors.md", "changes.md", "coming-from/names.md"})


def test_every_notebook_is_a_tutorial():
    tutorials = {p.name: p.resolve() for p in (ROOT / "docs" / "tutorials").glob("*.ipynb")}
    assert {p.name: p.read_text() for p in (ROOT / "notebooks").glob("*.ipynb")} == {
        name: p.read_text() for name, p in tutorials.items()
    }


def test_the_page_of_errors_has_what_is_raised(site):
    page = site.errors()
    assert len(re.findall(r"^  why:", page, re.M)) > 250
    with pytest.raises(TypeError) as error:
        zf.clip_by_global_norm(1.0, over=3)
    (why,) = re.findall(r"why: +(.*)", str(error.value))
    assert why in page
    # A text that is put together by +=.
    assert "for attention, in loss_fn: with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)" in page


def test_pages_that_the_package_names_exist():
    for path in (ROOT / "zerofn").rglob("*.py"):
        for page in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
            assert (ROOT / page).is_file(), f"{path.name}: {page}"


def test_the_chart_of_benchmarks_has_the_figures_of_its_table(site):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = site.chart(page)
    assert f">{746 / 874:.2f}<" in shown and f">{8.06 / 16.16:.2f}<" in shown
    # The difference of losses has nothing to be a share of.
    assert shown.count("<rect") == len(re.findall(r"^\| .*\]\(benchmarks/", page, re.M)) - 1
