"""What the site has beside the pages: the API, all errors, the change log. A hook of mkdocs (`mkdocs.yml`)."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent

# The folder in which a name of `zerofn` is defined, and the page that has it.
PAGES = {
    "core": "chains",
    "eager": "training",
    "pure": "training",
    "ranks": "ranks",
    "storage": "saving",
    "transforms": "transforms",
    "contrib": "more",
}
TITLES = {
    "chains": "Chains",
    "training": "Training: attach, init, make_step",
    "ranks": "Ranks",
    "saving": "Saving and tables",
    "transforms": "Transforms",
    "more": "What few people need",
}


def public(module: ModuleType) -> list[str]:
    """The names that a module is for: those that it lists, or else those that it defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    names = (n for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__)
    return sorted(n for n in names if not n.startswith("_"))


def reference() -> dict[str, str]:
    """The pages of the API, by path."""
    import zerofn as zf

    names: dict[str, list[str]] = {page: [] for page in TITLES}
    modules: dict[str, ModuleType] = {}
    for name in sorted(zf.__all__):
        found = getattr(zf, name)
        if isinstance(found, ModuleType):
            modules[name] = found
        else:
            folder = found.__module__.split(".")[1]
            names[PAGES[folder]].append(f"zerofn.{name}")
    pages = {f"api/{page}.md": f"# {TITLES[page]}\n\n{_entries(found)}" for page, found in names.items()}
    for name, module in modules.items():
        entries = _entries(f"{module.__name__}.{each}" for each in public(module))
        about = (inspect.getdoc(module) or "").partition("\nExamples:")[0]
        pages[f"api/{name}.md"] = f"# `zerofn.{name}`\n\n{about}\n\n{entries}"
    return pages


def _entries(names: Iterable[str]) -> str:
    return "\n".join(map(_entry, names))


def _entry(name: str) -> str:
    """What has a docstring is shown by mkdocstrings. Of a constant or an alias the page of names has a line."""
    module, _, own = name.rpartition(".")
    found = getattr(importlib.import_module(module), own)
    if inspect.isfunction(found) or inspect.isclass(found):
        return f"::: {name}\n"
    lines = (ROOT / "docs" / "extend" / "names.md").read_text()
    line = re.search(rf"^\| `{own}` \| (.*) \|$", lines, re.M)
    return f"## `{name}` {{#{name}}}\n\n{line[1] if line else ''}\n"


def names_of_others() -> str:
    """The page of names of other libraries, and what to write here."""
    from zerofn._errors import OTHER_NAMES

    rows = [f"| `{name}` | {write} |" for name, write in sorted(OTHER_NAMES.items(), key=lambda row: row[0].lower())]
    about = (
        "The first column has names of optax, torch, FSDP2 and DeepSpeed that zerofn lacks. The second column says "
        "what to write instead. If you write `zf.` before such a name, the error says the same."
    )
    return "\n".join(["# Names of other libraries", "", about, "", "| name | write |", "|---|---|", *rows, ""])


# ---------------------------------------------------------------- errors


def errors() -> str:
    """A page of the messages in the sources: the wrong code, why it is wrong, what to write."""
    lines = [
        "# Errors",
        "",
        "Every message says which code was wrong, why, and what to write instead. This page is made from the sources.",
        "`{...}` stands for the names and numbers that a message fills in. Search this page for words of your message.",
    ]
    for path in sorted((ROOT / "zerofn").rglob("*.py")):
        found = sorted(set(_messages(ast.parse(path.read_text()))))
        title = path.relative_to(ROOT / "zerofn").with_suffix("")
        if found and not title.parts[0].startswith("_"):
            lines += ["", f"## `{title}`", ""]
            lines += [line for message in found for line in _shown(*message)]
    return "\n".join(lines) + "\n"


def _shown(*message: str) -> Iterator[str]:
    from zerofn._errors import explain

    yield "```{ .text .message }"
    yield explain(*message)
    yield "```"
    yield ""


def _messages(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "explain":
            inside = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or 0)]
            scopes: list[ast.AST] = sorted(inside, key=lambda f: -f.lineno)
            texts = [_text(a, [*scopes, tree], call.lineno) for a in call.args]
            if len(texts) == 3 and texts[1] != "{...}":
                yield texts[0], texts[1], texts[2]


def _text(node: ast.AST, scopes: list[ast.AST], before: int) -> str:
    """What an expression of text says, as far as the source alone tells."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, [], before) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, scopes, before) + _text(node.right, scopes, before)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body, scopes, before)} | {_text(node.orelse, scopes, before)}"
    if isinstance(node, ast.Name):
        for scope in scopes:
            values = [v for line, v in _assigned(scope, node.id) if line < before]
            if values:
                return _text(values[-1], scopes, min(before, values[-1].lineno))
    return "{...}"


def _assigned(scope: ast.AST, name: str) -> list[tuple[int, Any]]:
    found = []
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                found += [(node.lineno, v) for t, v in pairs if isinstance(t, ast.Name) and t.id == name]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            before = ast.Name(name, ast.Load())
            found.append((node.lineno, ast.copy_location(ast.BinOp(before, node.op, node.value), node)))
    return sorted(found, key=lambda pair: pair[0])


# ---------------------------------------------------------------- the chart of benchmarks


def chart(page: str) -> str:
    """A picture of the table of benchmarks: for each row, the figure of zerofn divided by the compared one."""
    shares = [(name, ours, beside) for name, ours, beside in _figures(page) if beside]
    most, wide, high, left = max(1.0, *(o / b for _, o, b in shares)), 300, 22, 250
    text = 'font-size="12" fill="currentColor"'
    lines = []
    for i, (name, ours, beside) in enumerate(shares):
        y, share = i * high, ours / beside
        bar = f'<rect x="{left}" y="{y + 4}" width="{wide * share / most:.0f}" height="{high - 8}" fill="#4c8bf5"/>'
        at = left + wide * share / most - 6
        number = f'<text x="{at:.0f}" y="{y + 15}" text-anchor="end" font-size="12" fill="#fff">{share:.2f}</text>'
        lines += [f'<text x="0" y="{y + 15}" {text}>{escape(name)}</text>', bar, number]
    one, bottom = left + wide / most, len(shares) * high
    lines.append(
        f'<line x1="{one:.0f}" y1="0" x2="{one:.0f}" y2="{bottom}" stroke="currentColor" stroke-dasharray="3"/>'
    )
    lines.append(f'<text x="{one:.0f}" y="{bottom + 15}" text-anchor="middle" {text}>the compared figure: 1</text>')
    about = "<p>Each bar is the figure of zerofn divided by the figure that it is compared with; less is better.</p>"
    size = f'width="{left + wide + 60}" viewBox="0 0 {left + wide + 60} {bottom + 20}" style="max-width:100%"'
    return f'{about}\n<svg {size} role="img">{"".join(lines)}</svg>'


def _figures(page: str) -> Iterator[tuple[str, float, float]]:
    for name, ours, beside in re.findall(r"^\| ([^|]+) \| ([\d.][^|]*) \| ([\d.][^|]*) \|", page, re.M):
        yield name, *(float(re.match(r"[\d.]+", cell)[0]) for cell in (ours, beside))


# ---------------------------------------------------------------- mkdocs calls these


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    made = reference()
    made["errors.md"] = errors()
    made["coming-from/names.md"] = names_of_others()
    made["changes.md"] = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fences say only their language. What a page links to outside of `docs/` is a name here."""
    if page.file.src_uri == "benchmarks.md":
        markdown = re.sub(r"^# .*$", lambda title: f"{title[0]}\n\n{chart(markdown)}", markdown, count=1, flags=re.M)
    markdown = re.sub(r"^```python no-run$", "```python", markdown, flags=re.M)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?:examples|notebooks|README)[^)]*\)", r"`\1`", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """What links to a page as it lies in the repository links to it here: in docstrings, errors and notebooks."""
    # Notebooks would fetch a library for diagrams.
    html = re.sub(r'<script type="module">(?:(?!</script>).)*mermaid.*?</script>', "", html, flags=re.S)
    top = "../" * page.url.count("/")
    html = re.sub(r'href="\.\./docs/([\w/-]+)\.md', rf'href="{top}\1/', html)
    return re.sub(r'(?<![\w/"])docs/([\w/-]+)\.md', rf'<a href="{top}\1/">docs/\1.md</a>', html)
