"""What low precision costs and saves: time of the update, loss, memory. Each prints its own table.

python examples/benchmarks/low_precision.py kernel     # one update per rounding; see update_kernel.py
python examples/benchmarks/low_precision.py loss       # every configuration x 3 seeds x 1000 steps
python examples/benchmarks/low_precision.py memory     # bytes per parameter, allocated and peak, and step time
"""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str]) -> None:
    if argv[:1] == ["kernel"]:
        import update_kernel

        # It has a command line of its own.
        sys.argv = ["low_precision.py kernel", *argv[1:]]
        update_kernel.main()
        return
    import low_precision_loss
    import low_precision_memory

    commands = {"loss": low_precision_loss, "memory": low_precision_memory}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = parser.add_subparsers(dest="command", required=True)
    parsers.add_parser("kernel", help="time of one update per rounding")
    for name, module in commands.items():
        module.arguments(parsers.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    o = parser.parse_args(argv)
    commands[o.command].main(o)


if __name__ == "__main__":
    main(sys.argv[1:])
