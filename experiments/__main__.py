"""Command line of the experiments: ``python -m experiments run uci``, then ``python -m experiments table uci``."""

import argparse
import json

import torch

from experiments import digits, toy, uci
from experiments.architectures import CLASSIFIERS, count_weights
from experiments.datasets import add_data_argument
from experiments.training import cached, results, trained

EXPERIMENTS = {"toy": toy, "uci": uci, "digits": digits}


def train(arguments: argparse.Namespace) -> None:
    """Train a network into the cache, or find it there, and print what it achieves as one line of JSON."""
    settings = {"n_train": arguments.n_train, "epochs": arguments.epochs, "seed": arguments.seed}
    net = trained(arguments.arch, arguments.size, data=arguments.data, **settings)
    scores = results(cached(arguments.arch, arguments.size, **settings))
    of = {"arch": arguments.arch, "size": arguments.size, "weights": count_weights(net)}
    print(json.dumps(of | settings | scores), flush=True)


def main() -> None:
    """Run the command that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("--threads", type=int, help="threads of torch (default: its own choice)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="train one network of the paper into the cache")
    command.add_argument("arch", choices=CLASSIFIERS)
    command.add_argument("size", choices=["tiny", "small", "med", "big"])
    command.add_argument("--n-train", type=int, default=60_000, help="training images (default 60000)")
    command.add_argument("--epochs", type=int, default=90, help="epochs (default 90)")
    command.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default 0)")
    add_data_argument(command)
    command.set_defaults(run=train)

    for verb, what in (
        ("run", "measure, into experiments/results"),
        ("table", "tables and figures of what was measured"),
    ):
        kinds = commands.add_parser(verb, help=what).add_subparsers(required=True, metavar="EXPERIMENT")
        for name, module in EXPERIMENTS.items():
            command = kinds.add_parser(name, help=str(module.__doc__).splitlines()[0])
            command.set_defaults(run=getattr(module, verb))
            if verb == "run":
                module.add_arguments(command)

    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
