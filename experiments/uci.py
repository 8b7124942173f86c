"""Small regression sets: which error bars are right, and which prior and model should be the default.

Every network is d-50-50-1, early-stopped on a sixth of its rows. The posterior is fitted on the other five sixths, which
gave the gradients; the sixth serves the variants that are calibrated on held-out data. All numbers are in units of the
training targets' standard deviation.
"""

import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import linlap as ll
from experiments import datasets, records, uci_tables
from experiments.architectures import uci_mlp, uci_mlp_layernorm
from experiments.datasets import Examples
from experiments.ensembles import Recipe, Weights, early_stopped, member
from experiments.scores import Forecast, Mixture, Normal, scores
from experiments.training import CACHE, validation_rows

SETS = ("yacht", "concrete", "kin8nm", "protein")
SPLITS = {"standard": range(5), "gap": range(2)}
NETS = {"mlp": uci_mlp, "layernorm": uci_mlp_layernorm}
MEMBERS = range(5)  # seeds; the first is the network that gets a posterior
TRAINING_ROWS, TEST_ROWS = 2000, 1000
FOLDER = records.RESULTS / "uci"

Means = dict[str, Forecast]
Method = Callable[["Cell"], tuple[Means, dict[str, Any]]]


@dataclass(frozen=True)
class Split:
    """One split of one set, and the kind of network."""

    name: str
    kind: str
    index: int
    net: str

    @property
    def title(self) -> str:
        """What files are named after."""
        return f"{self.name}-{self.kind}{self.index}-{self.net}"


@dataclass(frozen=True)
class Cell:
    """A trained network with its data."""

    net: nn.Module
    members: list[nn.Module]
    train: Examples
    held_out: Examples
    test: Examples
    seeds: range

    @cached_property
    def plain(self) -> Normal:
        """The network with the maximum-likelihood noise of its training residuals."""
        return plain(self.net, self.train, self.test)

    @cached_property
    def naive(self) -> ll.Posterior:
        """The evidence at the trained weights, one precision."""
        return self.fit(evidence_at="trained", prior="single")

    def fit(self, **options: Any) -> ll.Posterior:
        """A posterior given the rows that gave the gradients."""
        return ll.fit(self.net, tuple(self.train), "regression", progress=False, **options)

    @cached_property
    def references(self) -> dict[str, Tensor]:
        """Log probability of every test target `[n]` under what the others are compared with."""
        y = self.test.y
        return {"plain": self.plain.log_prob(y), "naive": both_means(self.naive, self.test.x)["network"].log_prob(y)}


# ---- methods ---------------------------------------------------------------------------------------------


@torch.no_grad()
def plain(net: nn.Module, residuals_of: Examples, test: Examples) -> Normal:
    """The network's output with constant noise: the root mean square of its residuals."""
    noise = (net(residuals_of.x) - residuals_of.y).square().mean().sqrt()
    mean = net(test.x)
    return Normal(mean, noise.expand_as(mean))


def both_means(post: ll.Posterior, x: Tensor) -> Means:
    """The predictive distributions around the network and around the linear model; the variance is computed once."""
    network, linear = post.predict(x), post.predict(x, mean="linear")
    ratio = post.calibration.variance["linear"] / post.calibration.variance["network"]
    spread = (ratio * network.variance + linear.noise_std**2).sqrt()
    return {"network": Normal(network.mean, network.std), "linear": Normal(linear.mean, spread)}


def fitted(cell: Cell, **options: Any) -> tuple[Means, dict[str, Any]]:
    """A posterior's predictive distributions, with what it learnt."""
    post = cell.fit(**options)
    return both_means(post, cell.test.x), learnt(post)


def learnt(post: ll.Posterior) -> dict[str, Any]:
    """The numbers of a posterior that its makers look at."""
    return {
        "log_evidence": post.log_evidence,
        "converged": post.status.converged,
        "message": post.status.message,
        "half_steps": len(post.history),
        "noise": post.noise,
        "effective_dimensions": sum(post.effective_dimensions.values()),
        "prior": post.prior,
    }


def naive(cell: Cell, **options: Any) -> tuple[Means, dict[str, Any]]:
    """At the trained weights, where only the network's mean makes sense."""
    post = cell.fit(evidence_at="trained", **options) if options else cell.naive
    return {"network": both_means(post, cell.test.x)["network"]}, learnt(post)


def calibrated(cell: Cell, **options: Any) -> tuple[Means, dict[str, Any]]:
    """Scales of variance and noise learnt on the validation sixth."""
    means, numbers = fitted(cell, held_out=tuple(cell.held_out), **options)
    return means, numbers


def ensemble(cell: Cell) -> tuple[Means, dict[str, Any]]:
    """An equal mixture of all members, each with the noise of its own training residuals."""
    everything = Examples(*(torch.cat([a, b]) for a, b in zip(cell.train, cell.held_out, strict=True)))
    parts = []
    for net, seed in zip(cell.members, cell.seeds, strict=True):
        rows = validation_rows(len(everything.y), seed)[0]
        parts.append(plain(net, in_file_order(cell, everything, rows), cell.test))
    return {"network": Mixture(parts)}, {}


def in_file_order(cell: Cell, everything: Examples, rows: Tensor) -> Examples:
    """Rows of the split, numbered as they were before the first member's sixth was taken away."""
    order = torch.cat(validation_rows(len(everything.y), cell.seeds[0])).argsort()
    return Examples(everything.x[order[rows]], everything.y[order[rows]])


def methods(net: str) -> dict[str, Method]:
    """Everything that is measured on a network of a kind, by name, what matters most first."""
    found: dict[str, Method] = {
        "naive, single": naive,  # first: the others are compared with it
        "plain": lambda cell: ({"network": cell.plain}, {}),
        "plain, held-out noise": lambda cell: ({"network": plain(cell.net, cell.held_out, cell.test)}, {}),
        "5-ensemble": ensemble,
        "naive, curvature": partial(naive, prior="curvature"),
    }
    normalised = ("normalised",) if net == "layernorm" else ()
    for prior in ("curvature", "single", "curvature-layer", "gauge", "layer", *normalised, "tensor", "hyper"):
        if prior == "gauge" and not normalised:
            continue  # without normalised groups it is "single"
        for model in ("linear", "affine"):
            found[f"{prior}, {model}"] = partial(fitted, prior=prior, model=model)
    for prior in ("curvature", "curvature-layer"):
        for model in ("linear", "affine"):
            found[f"{prior}, {model}, held out"] = partial(calibrated, prior=prior, model=model)
    return found


# ---- one network -----------------------------------------------------------------------------------------


def cell_of(split: Split, data: datasets.Folder) -> Cell:
    """The data of a split, and its networks, trained unless they are in the cache."""
    sets = datasets.uci(split.name, split.kind, split.index, n_train=TRAINING_ROWS, data=data, dtype=torch.float64)  # type: ignore[arg-type]
    build = partial(double, NETS[split.net], sets.train.x.shape[1])
    seeds = range(10 * split.index, 10 * split.index + len(MEMBERS))
    weights = members(CACHE / f"uci-ensemble-{split.title}-n{TRAINING_ROWS}.safetensors", build, sets.train, seeds)
    train, held_out = (
        Examples(sets.train.x[rows], sets.train.y[rows]) for rows in validation_rows(len(sets.train.y), seeds[0])
    )
    nets = [member(build, weights, number) for number in range(len(seeds))]
    return Cell(nets[0], nets, train, held_out, some(sets.test, split.index), seeds)


def double(build: Callable[[int], nn.Module], features: int) -> nn.Module:
    """In float64."""
    return build(features).double()


def members(path: Path, build: Callable[[], nn.Module], train: Examples, seeds: range) -> Weights:
    """Weights of an ensemble, from the cache if they are there."""
    if not path.exists():
        weights = early_stopped(build, train, seeds, Recipe())
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        save_file(weights, draft)
        draft.replace(path)
    return load_file(path)


def some(test: Examples, seed: int) -> Examples:
    """At most a thousand test rows, at random."""
    rows = torch.randperm(len(test.y), generator=torch.Generator().manual_seed(seed))[:TEST_ROWS]
    return Examples(test.x[rows], test.y[rows])


def measure(split: Split, data: datasets.Folder, wanted: list[str]) -> None:
    """Every method that is not yet in the file of this network; written after each."""
    path = FOLDER / f"{split.title}.json"
    content = records.read(path)
    missing = {
        name: method
        for name, method in methods(split.net).items()
        if name not in content.get("methods", {}) and any(text in name for text in wanted)
    }
    if not missing:
        return
    cell = cell_of(split, data)
    if not content:
        content = {"split": asdict(split), "setting": setting(cell), "methods": {}}
    for name, method in missing.items():
        content["methods"][name] = outcome(cell, method) | {"versions": records.versions()}
        records.write(path, content)
        print(f"{split.title}  {name:32} {brief(content['methods'][name])}", flush=True)


def setting(cell: Cell) -> dict[str, Any]:
    """Rows, seeds and how the networks were trained."""
    return {
        "training_rows": len(cell.train.y),
        "held_out_rows": len(cell.held_out.y),
        "test_rows": len(cell.test.y),
        "seeds": list(cell.seeds),
        "recipe": asdict(Recipe()),
        "training_rmse": float(plain(cell.net, cell.train, cell.train).std[0]),
        "held_out_rmse": float(plain(cell.net, cell.held_out, cell.held_out).std[0]),
    }


def outcome(cell: Cell, method: Method) -> dict[str, Any]:
    """Scores of a method's means on the test rows, what it learnt, what it warned about and the time it took."""
    start = time.process_time()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        means, numbers = method(cell)
        seconds, kinds = time.process_time() - start, sorted({w.category.__name__ for w in warned})
        scored = {mean: scores(forecast, cell.test.y, cell.references) for mean, forecast in means.items()}
    return {"means": scored, "warnings": kinds, "seconds": round(seconds, 2)} | numbers


def brief(result: dict[str, Any]) -> str:
    """One line to watch."""
    nll = "  ".join(f"{mean} {s['nll']:8.3f} ({s['inside'] / s['n']:.2f})" for mean, s in result["means"].items())
    return f"{nll}  {result['seconds']:.1f} s{'' if result.get('converged', True) else '  NOT CONVERGED'}"


# ---- commands --------------------------------------------------------------------------------------------


def add_arguments(command: ArgumentParser) -> None:
    """The flags of `run uci`."""
    datasets.add_data_argument(command)
    command.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="default: all")
    command.add_argument("--splits", nargs="+", choices=[*SPLITS], default=[*SPLITS], help="default: both kinds")
    command.add_argument("--first", type=int, default=5, metavar="N", help="splits of each kind (default: all)")
    command.add_argument("--nets", nargs="+", choices=[*NETS], default=[*NETS], help="default: both")
    command.add_argument(
        "--methods", nargs="+", metavar="TEXT", default=[""], help="only those whose name has one of these"
    )


def run(arguments: Namespace) -> None:
    """Measure what is not measured yet."""
    for split in splits(arguments):
        measure(split, arguments.data, arguments.methods)


def splits(arguments: Namespace) -> Iterator[Split]:
    """The splits that were asked for, the first split of every set first."""
    for index in range(min(arguments.first, max(len(indices) for indices in SPLITS.values()))):
        for name in arguments.sets:
            for kind in arguments.splits:
                if index in SPLITS[kind]:
                    yield from (Split(name, kind, index, net) for net in arguments.nets)


table = uci_tables.table
