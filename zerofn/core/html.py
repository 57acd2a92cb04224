"""Makes HTML and SVG without scripts for notebooks: a card with a title, a road, tables with bars, a curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

# Colors that can be read on light and on dark pages; text takes that of the page.
LINE, FILL = "#8888", "#4c8bf5"
BOX = f"border:1px solid {LINE};border-radius:4px;padding:2px 8px;margin:2px;line-height:1.25"
SMALL = "font-size:85%;opacity:0.75"
CELL = "padding:1px 10px 1px 0;border:0"


def card(title: str, *shown: str, text: str = "") -> str:
    """A title, what is shown under it, and all of it as text behind a click.

    >>> card("a state", "<p>12</p>", text="w: 12").count("<details>")
    1
    """
    more = f'<details><summary style="{SMALL}">as text</summary><pre>{escape(text)}</pre></details>' if text else ""
    return f'<div style="margin:4px 0"><div><b>{escape(title)}</b></div>{"".join(shown)}{more}</div>'


def road(stops: Sequence[tuple[str, str]]) -> str:
    """Boxes in a row with arrows between them. Each has a name, and below it more text in small letters.

    >>> road([("model", ""), ("sgd", "lr=0.1")]).count("&rarr;")
    1
    """
    boxes = []
    for name, more in stops:
        below = f'<br/><span style="{SMALL}">{escape(more)}</span>' if more else ""
        boxes.append(f'<span style="{BOX}">{escape(name)}{below}</span>')
    arrow = "<span>&rarr;</span>"
    return f'<div style="display:flex;flex-wrap:wrap;align-items:center">{arrow.join(boxes)}</div>'


def table(head: Sequence[str], rows: Sequence[tuple[Sequence[str], float]], units: Sequence[tuple[str, float]]) -> str:
    """Rows of words with a size: as a number in one unit for all, and as a bar. Rows of 0.00 are left out.

    Args:
        head: titles of the words; that of the sizes is their unit.
        rows: of each its words, and its size.
        units: names and sizes of units, from the smallest on; the largest that is not above the largest row is taken.

    >>> shown = table(["part"], [(["params"], 2048.0), (["state"], 0.0)], BYTES)
    >>> shown.count("<tr>"), "KiB" in shown, "2.00" in shown
    (2, True, True)
    """
    most = max((size for _, size in rows), default=0.0) or 1.0
    unit, one = next((u for u in reversed(units) if u[1] <= most), units[0])
    rows = [(words, size) for words, size in rows if size / one >= 0.005]
    digits = 0 if one == 1 and all(float(size).is_integer() for _, size in rows) else 2
    titles = "".join(f'<td style="{CELL};{SMALL};text-align:left">{escape(t)}</td>' for t in (*head, unit))
    lines = [f"<tr>{titles}<td></td></tr>"]
    for words, size in rows:
        number = f"{size / one:,.{digits}f}"
        cells = "".join(f'<td style="{CELL};text-align:left">{escape(word)}</td>' for word in words)
        bar = f'<div style="background:{FILL};height:0.8em;width:{200 * size / most:.0f}px"></div>'
        lines.append(f'<tr>{cells}<td style="{CELL};text-align:right">{number}</td><td style="{CELL}">{bar}</td></tr>')
    return f'<table style="border:0">{"".join(lines)}</table>'


BYTES = (("bytes", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30))
SECONDS = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))
COUNTS = (("", 1.0), ("thousand", 1e3), ("million", 1e6), ("billion", 1e9))


def kept(tensors: Iterable[tuple[str, Sequence[str], int]], head: Sequence[str]) -> str:
    """A table of the bytes of each part. A tensor is given as its part, some words, and its bytes.

    >>> kept([("params", ["bf16"], 8), ("params", ["fp32"], 8)], ["dtype"]).count("bf16, fp32")
    1
    """
    words: dict[str, list[Counter[str]]] = {}
    sizes: Counter[str] = Counter()
    for part, texts, size in tensors:
        sizes[part] += size
        for counter, word in zip(words.setdefault(part, [Counter() for _ in head]), texts, strict=True):
            counter[word] += size
    # The word with the most bytes comes first. A word with less than 1 % of them, such as the dtype of counters, stands
    # in the text only.
    rows = [
        (
            [part, *(", ".join(w for w, n in counter.most_common() if n >= sizes[part] / 100) for counter in columns)],
            sizes[part],
        )
        for part, columns in words.items()
    ]
    return table(["", *head], rows, BYTES)


def numbers(values: Sequence[tuple[str, str]]) -> str:
    """Names and numbers without a unit in common, in one row.

    >>> numbers([("lr", "0.1")]).count("<td")
    2
    """
    names = "".join(f'<td style="{CELL};{SMALL};text-align:left">{escape(name)}</td>' for name, _ in values)
    cells = "".join(f'<td style="{CELL};text-align:left">{escape(value)}</td>' for _, value in values)
    return f'<table style="border:0"><tr>{names}</tr><tr>{cells}</tr></table>'


def curve(values: Sequence[float], last: int) -> str:
    """A line through values at equal distances, from step 0 to `last`; the largest and the smallest stand beside it.

    >>> "polyline" in curve([0.0, 1.0, 0.5], 2)
    True
    """
    low, high = min(values), max(values)
    width, height, span = 320, 90, (high - low) or 1.0
    end = max(len(values) - 1, 1)
    points = " ".join(f"{width * i / end:.1f},{height * (1 - (v - low) / span) + 5:.1f}" for i, v in enumerate(values))
    text = 'style="font:11px sans-serif" fill="currentColor"'
    return (
        f'<div><svg width="{width + 90}" height="{height + 28}" role="img">'
        f'<line x1="0" y1="{height + 9}" x2="{width}" y2="{height + 9}" stroke="{LINE}"/>'
        f'<polyline points="{points}" fill="none" stroke="{FILL}" stroke-width="2"/>'
        f'<text x="{width + 6}" y="14" {text}>{high:.4g}</text>'
        f'<text x="{width + 6}" y="{height + 5}" {text}>{low:.4g}</text>'
        f'<text x="0" y="{height + 23}" {text}>step 0</text>'
        f'<text x="{width}" y="{height + 23}" text-anchor="end" {text}>{last:,}</text></svg></div>'
    )
