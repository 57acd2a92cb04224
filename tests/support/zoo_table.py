"""Run the zoo on two ranks, and print the table of `docs/benchmarks/zoo.md`.

    PYTHONPATH=. python tests/support/zoo_table.py RESULTS.json [words of names ...]

Results are added to the file, and architectures that stand in it are not run again. FSDP2 runs in launches of its own,
since it may hang.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import zoo
import zoo_ways
from time_limits import limit

import zerofn as zf

TOGETHER, SECONDS = 24, 600.0


def ran(names: list[str], ways: list[str]) -> dict[str, dict[str, Any]]:
    """By architecture and way: what both ranks say, or the first rank's error. A launch that fails is halved."""
    try:
        both = zf.launch(zoo_ways.on_a_rank, 2, dict.fromkeys(names, ways), timeout=limit(SECONDS))
    except Exception as error:
        if len(names) > 1:
            half = len(names) // 2
            return ran(names[:half], ways) | ran(names[half:], ways)
        return {names[0]: dict.fromkeys(ways, f"{type(error).__name__}: {error}")}
    return {name: {way: worst([rank[name][way] for rank in both]) for way in ways} for name in names}


def installed(name: str) -> bool:
    try:
        zoo.built(name)
    except ImportError:
        return False
    return True


def beside(names: list[str]) -> dict[str, Any]:
    """FSDP2's answers; a rank that waits in vain ends a launch, and the rest is done in another."""
    found: dict[str, Any] = {}
    while left := [n for n in names if n not in found]:
        try:
            ranks = zf.launch(zoo_ways.fsdp2_on_a_rank, 2, left, SECONDS / 10, timeout=limit(SECONDS))
        except Exception as error:
            if len(left) == 1:
                return found | {left[0]: f"{type(error).__name__}: {error}"}
            half = len(left) // 2
            return found | beside(left[:half]) | beside(left[half:])
        for name in left:
            answers = [rank[name] for rank in ranks if name in rank]
            if answers:
                found[name] = zoo_ways.HANGS if zoo_ways.HANGS in answers else worst(answers)
    return found


def worst(answers: list[Any]) -> Any:
    return max(answers, key=lambda x: (isinstance(x, str), x))


def run(path: Path, names: list[str], fsdp2: bool = False) -> None:
    """Add to the file what it lacks: the ways of zerofn, or FSDP2."""
    found = json.loads(path.read_text()) if path.exists() else {}
    ways = ["FSDP2"] if fsdp2 else list(zoo_ways.WAYS)
    left = [n for n in names if ways[0] not in found.get(n, {})]
    for i in range(0, len(left), TOGETHER):
        part = list(filter(installed, left[i : i + TOGETHER]))
        answers = {n: {"FSDP2": x} for n, x in beside(part).items()} if fsdp2 else ran(part, ways) if part else {}
        for name, of in answers.items():
            found.setdefault(name, {}).update(of)
        path.write_text(json.dumps(found, indent=1))
        print(f"{ways[0]}: {i + len(part)} of {len(left)}", file=sys.stderr, flush=True)


# What an error says, and the few words for it in the table; the first that is found.
REASONS = {
    "torch: ": "torch too",
    "complex": "complex numbers",
    "mixed torch.Tensor and DTensor": "DTensor beside Tensor",
    "scalar parameters": "0-d parameters",
    "expects non-empty": "an empty leaf",
    "uniform gradient dtype": "dtypes of gradients",
    "original parameter dtype": "dtypes of parameters",
    "setStorage": "gradients in forward",
    "have been used in the graph": "gradients in backward",
    "SIGSEGV": "a rank dies",
    "RankTimeout": "hangs",
    zoo_ways.HANGS: "hangs",
    "SIGABRT": "collectives differ",
}


def reason(text: str) -> str:
    for words, short in REASONS.items():
        if words in text:
            return short
    return text.splitlines()[0].replace("|", "/")[:40]


def cell(name: str, way: str, answer: Any) -> str:
    if isinstance(answer, str):
        return reason(answer)
    if not math.isfinite(answer[0]):
        return "NaN, torch too"
    return "right" if zoo_ways.right(name, "ZeRO-3" if way == "FSDP2" else way, answer) else f"off by {answer[0]:.0e}"


def table(found: dict[str, dict[str, Any]]) -> str:
    """A row for each architecture: how many ways are right, which are not and why, and FSDP2."""
    lines, ways = [], list(zoo_ways.WAYS)
    for library in dict.fromkeys(zoo.LIBRARY.values()):
        rows = [n for n in zoo.ROWS if zoo.LIBRARY[n] == library and n in found]
        lines += [f"## {library}", "", "| architecture | right | not right | FSDP2 |", "|---|---|---|---|"]
        for name in rows:
            cells = {way: cell(name, way, found[name][way]) for way in ways}
            wrong: dict[str, list[str]] = {}
            for way, words in cells.items():
                if words != "right":
                    wrong.setdefault(words, []).append(way)
            ordered = sorted(wrong.items(), key=lambda x: len(x[1]))
            told = {words: " and ".join(of) if len(of) < 3 else "others" for words, of in ordered}
            why = "; ".join(f"{of}: {words}" for words, of in told.items())
            beside = cell(name, "FSDP2", found[name]["FSDP2"]) if "FSDP2" in found[name] else ""
            lines.append(f"| {name} | {list(cells.values()).count('right')} | {why} | {beside} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    where, words = Path(sys.argv[1]), sys.argv[2:]
    chosen = [n for n in zoo.ROWS if not words or any(w in n for w in words)]
    for fsdp2 in (False, True):
        run(where, chosen, fsdp2)
    print(table(json.loads(where.read_text())))
