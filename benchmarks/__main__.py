"""Command line of the benchmarks: ``python -m benchmarks run dense``; every case in a process of its own."""

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import dense, kron, predict, solver
from experiments import records
from experiments.datasets import add_data_argument

BENCHMARKS = {"dense": dense, "solver": solver, "predict": predict, "kron": kron}
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    return {"processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def one(arguments: argparse.Namespace) -> None:
    """Measure a case and write it down."""
    path = RESULTS / f"{arguments.benchmark}.json"
    measured = BENCHMARKS[arguments.benchmark].measure(arguments.case, arguments.data)
    entry: dict[str, object] = {}
    for part in [measured] if isinstance(measured, dict) else measured:
        entry |= part
        content = records.read(path)
        content[arguments.case] = entry | {"machine": machine(), "versions": records.versions()}
        records.write(path, content)
        print(arguments.benchmark, arguments.case, part, flush=True)


def run(arguments: argparse.Namespace) -> None:
    """Measure the cases that are not in the results yet, each in a process of its own."""
    known = records.read(RESULTS / f"{arguments.benchmark}.json")
    for case in arguments.cases or BENCHMARKS[arguments.benchmark].CASES:
        if arguments.again or case not in known:
            command = [sys.executable, "-m", "benchmarks", "one", arguments.benchmark, case]
            subprocess.run(command + (["--data", str(arguments.data)] if arguments.data else []), check=True)


def main() -> None:
    """Run the command that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("run", help="measure what is not measured yet, into benchmarks/results")
    command.add_argument("benchmark", choices=BENCHMARKS)
    command.add_argument("cases", nargs="*", help="default: all")
    command.add_argument("--again", action="store_true", help="also what is measured already")
    command.set_defaults(run=run)
    add_data_argument(command)
    command = commands.add_parser("plot", help="figures of what was measured")
    command.set_defaults(run=lambda _: kron.plot(RESULTS))
    command = commands.add_parser("one", help="measure one case in this process")
    command.add_argument("benchmark", choices=BENCHMARKS)
    command.add_argument("case")
    command.set_defaults(run=one)
    add_data_argument(command)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
