"""A table of what a step asks of a GPU, counted on the device that does not exist: launches for each row of transforms.

    PYTHONPATH=. python tests/support/count_launches.py                        # every row, minutes
    PYTHONPATH=. python tests/support/count_launches.py --only lion adan --leaves 148

Launches are those of one step of an attached model, forward and backward included where zerofn asks for them. The last
column counts only those outside of the views, as a loss scale has a launch for each leaf in backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import virtual_cuda

# Launches that a row may have at any number of leaves. Those with products of matrices have their own.
MOST = 12
PRODUCTS = {"muon": None, "shampoo": 120, "soap": 120}


def goal(name: str) -> int | None:
    return next((most for word, most in PRODUCTS.items() if word in name), MOST)


def rows(pool: ProcessPoolExecutor, names: list[str], leaves: list[int]) -> Iterator[dict[Any, Any]]:
    """Counts by row, as they are found; an error's first line where a row cannot be counted."""
    for name in names:
        found: dict[Any, Any] = {"name": name, "goal": goal(name), "error": ""}
        for n in leaves:
            try:
                told = pool.submit(virtual_cuda.call, "virtual_steps", "counts", "attached", name, leaves=n).result()
                found[n] = told["launches"], sum(told["waits"].values()), told["copies"], told["step"]
            except Exception as error:  # other rows are counted
                found["error"] = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield found


def line(found: dict[Any, Any], leaves: list[int]) -> str:
    counts = [found.get(n) for n in leaves]
    launches = [str(x[0]) if x else "" for x in counts]
    waits, copies, step = [str(x) for x in counts[-1][1:]] if counts[-1] else [""] * 3
    most = found["goal"]
    over = most is not None and any(x and x[0] > most for x in counts)
    aim = "" if most is None or not all(counts) else f"{most} {'MISSED' if over else 'met'}"
    return "| " + " | ".join([found["name"], *launches, aim, waits, copies, step, found["error"]]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, nargs="+", default=[148, 500])
    parser.add_argument("--only", nargs="+", metavar="ROW")
    o = parser.parse_args()
    head = ["row", *(f"launches, {n} leaves" for n in o.leaves), "goal", "waits", "copies", "outside of views", "error"]
    with virtual_cuda.processes() as pool:
        names = o.only or pool.submit(virtual_cuda.call, "count_launches", "names").result()
        print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        missed = 0
        for found in rows(pool, names, o.leaves):
            shown = line(found, o.leaves)
            missed += "MISSED" in shown
            print(shown, flush=True)
    print(f"\n{missed} of {len(names)} rows miss their goal")


def names() -> list[str]:
    """All rows; asked in the process of the device, since the table imports torch."""
    from transforms_table import ROWS

    return list(ROWS)


if __name__ == "__main__":
    main()
