"""Small pictures for notebooks, as HTML and SVG without scripts: a row of boxes, a table with bars, a curve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# Colors that can be read on light and on dark pages; text takes that of the page.
LINE, FILL = "#8888", "#4c8bf5"
BOX = f"border:1px solid {LINE};border-radius:4px;padding:2px 8px;margin:2px;white-space:nowrap"


def road(stops: Sequence[tuple[str, str]]) -> str:
    """Boxes in a row with arrows between them: of each its name, and what is shown when a mouse rests on it.

    >>> road([("model", ""), ("sgd", "sgd(lr=0.1)")]).count("&rarr;")
    1
    """
    boxes = [f'<span style="{BOX}" title="{escape(more, quote=True)}">{escape(name)}</span>' for name, more in stops]
    arrow = "<span>&rarr;</span>"
    return f'<div style="display:flex;flex-wrap:wrap;align-items:center">{arrow.join(boxes)}</div>'


def bars(rows: Iterable[tuple[str, str, float]], note: str = "") -> str:
    """A table: of each row its name, its size in words, and a bar for its share of the largest.

    >>> bars([("params", "8 B", 8.0), ("state", "2 B", 2.0)]).count("<tr>")
    2
    """
    rows = list(rows)
    most = max((size for _, _, size in rows), default=0.0) or 1.0
    lines = [
        f'<tr><td style="text-align:left">{escape(name)}</td><td style="text-align:right">{escape(told)}</td>'
        f'<td style="text-align:left"><div style="background:{FILL};height:0.8em;width:{200 * size / most:.0f}px">'
        "</div></td></tr>"
        for name, told, size in rows
    ]
    return f"<table>{''.join(lines)}</table><p>{escape(note)}</p>"


def curve(values: Sequence[float], title: str) -> str:
    """A line through values at equal distances, with the largest and the smallest written beside it.

    >>> "polyline" in curve([0.0, 1.0, 0.5], "a schedule")
    True
    """
    low, high = min(values), max(values)
    width, height, span = 320, 90, (high - low) or 1.0
    last = max(len(values) - 1, 1)
    points = " ".join(f"{width * i / last:.1f},{height * (1 - (v - low) / span) + 5:.1f}" for i, v in enumerate(values))
    text = f'style="font:11px sans-serif" fill="{FILL}"'
    return (
        f'<div><div>{escape(title)}</div><svg width="{width + 90}" height="{height + 10}" role="img">'
        f'<polyline points="{points}" fill="none" stroke="{FILL}" stroke-width="2"/>'
        f'<text x="{width + 6}" y="14" {text}>{high:.4g}</text>'
        f'<text x="{width + 6}" y="{height + 5}" {text}>{low:.4g}</text></svg></div>'
    )
