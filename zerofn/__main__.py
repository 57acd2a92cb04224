"""`python -m zerofn doctor`: what this machine has, and what would be slow on it."""

from __future__ import annotations

import argparse
import sys

from .contrib.doctor import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m zerofn")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="versions, kernel, ranks, and what would be slow here")
    doctor.add_argument("--ranks", type=int, default=2, help="local ranks to try (2); 0 for none")
    sys.exit(main(parser.parse_args().ranks))
