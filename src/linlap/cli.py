"""The command line: `linlap demo`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from linlap import demo
from linlap.errors import LinlapError

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; 0 done, 2 bad input."""
    chosen = parser().parse_args(arguments)
    try:
        chosen.act(chosen)
    except (LinlapError, OSError) as refused:
        print(f"linlap: {refused}", file=sys.stderr)
        return BAD_INPUT
    return 0


def parser() -> argparse.ArgumentParser:
    """All commands; each has an example."""
    top = argparse.ArgumentParser(
        prog="linlap",
        description="Calibrated error bars and a model evidence for PyTorch networks that are already trained.",
        epilog="example: linlap demo --out figures",
    )
    top.add_argument("--version", action="version", version=f"linlap {version('linlap')}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    one = commands.add_parser(
        "demo",
        help="see the method at work on scikit-learn's digits and diabetes",
        description="Train three small networks, give each a posterior, print both side by side, write figures.",
        epilog="example: linlap demo --out figures",
    )
    one.add_argument("--out", metavar="DIR", default="linlap-demo", help="where the figures go (default: linlap-demo)")
    one.set_defaults(act=lambda chosen: demo.run(chosen.out))
    return top


if __name__ == "__main__":
    sys.exit(main())
