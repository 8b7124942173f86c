"""Images: the probabilities of tiny classifiers of MNIST and what they make of KMNIST, for every prior and model.

Every network is trained on the first images of MNIST by its recipe of the paper; the posterior is fitted to the same
images, the next ones serve what is calibrated on held-out data. H at the trained network is the same for all priors and
models, so it is built once a network; so are the Jacobians of the test images.
"""

import math
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import linlap as ll
from experiments import batching, datasets, digits_tables, records
from experiments.batching import Chunks
from experiments.classification import auroc, log_prob, scores, temperature
from experiments.datasets import Examples
from experiments.digits_networks import EPOCHS, NETS, TRAINING_IMAGES, Which, images, network
from experiments.digits_tables import REFRESHED
from linlap.curvature.dense import Dense, DenseCurvature
from linlap.problem import Problem

SEEDS = range(3)
BATCH, AT_ONCE = 200, 100
SAMPLES = 1000
MEMORY = "6GiB"
MODELS, LINKS = ("linear", "affine"), ("probit", "mc")
ORACLE = tuple(i / 2 for i in range(-2, 9))
"""Decades from the evidence's own precision."""

ORACLE_IMAGES = 4
"""The grid is tried on every fourth test image."""

FOLDER = records.RESULTS / "digits"

Result = dict[str, Any]
Method = Callable[["Cell"], dict[str, Result]]
"""What is measured on a network, by what is added to the method's name."""


@dataclass
class Once(Dense):
    """The dense structure, with H at the trained network built for the first posterior only."""

    outputs: Tensor | None = None
    kept: DenseCurvature | None = None
    seconds: float = 0.0

    def of(self, problem: Problem, outputs: Tensor) -> DenseCurvature:
        """H, which depends on the network and the images alone."""
        if self.kept is None or self.outputs is None or not torch.equal(outputs, self.outputs):
            start = time.process_time()
            self.outputs, self.kept = outputs, super().of(problem, outputs)
            self.seconds = time.process_time() - start
        self.kept = replace(self.kept, problem=problem)
        return self.kept


@dataclass(frozen=True)
class Inputs:
    """Examples as chunks, with what all methods need of them."""

    net: nn.Module
    chunks: Chunks

    @staticmethod
    def of(net: nn.Module, examples: Examples) -> "Inputs":
        """Point clouds are sorted by length."""
        return Inputs(net, list(batching.in_order(examples, BATCH)))

    @cached_property
    def y(self) -> Tensor:
        """Labels in the order of the chunks."""
        return torch.cat([y for _, y in self.chunks])

    @cached_property
    @torch.no_grad()
    def logits(self) -> Tensor:
        """Of the network, float64."""
        return torch.cat([self.net(x) for x, _ in self.chunks]).double()

    @cached_property
    def jacobian(self) -> Tensor:
        """`[n, C, P]`."""
        linearised = ll.linearise(self.net)
        return torch.cat([linearised.jacobian(x) for x, _ in self.chunks])

    def covariance(self, factor: ll.Factor) -> Tensor:
        """Of the logits of each example `[n, C, C]`, float64."""
        return torch.cat([factor.covariance(part) for part in self.jacobian.split(AT_ONCE)]).double()


@dataclass(frozen=True)
class Cell:
    """A trained network with its data."""

    net: nn.Module
    train: Inputs
    held_out: Inputs
    test: Inputs
    unfamiliar: Inputs
    structure: Once = field(default_factory=Once)

    def fit(self, **options: Any) -> ll.Posterior:
        """A posterior given the training images."""
        settings = {"curvature": self.structure, "memory": MEMORY, "progress": False}
        return ll.fit(self.net, self.train.chunks, "classification", **settings, **options)

    @cached_property
    def naive(self) -> ll.Posterior:
        """The evidence at the trained weights, one precision."""
        return self.fit(evidence_at="trained", prior="single")

    @cached_property
    def references(self) -> dict[str, Tensor]:
        """Log probability of every label `[n]` under what the others are compared with."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ahead = forecast(self.naive, self.test, "network", self.test.covariance(self.naive.factor))
        return {
            "plain": log_prob(self.test.logits.softmax(1), self.test.y),
            "naive": log_prob(probs(ahead, "mc"), self.test.y),
        }

    def scored(self, known: Tensor, unfamiliar: Tensor) -> Result:
        """Scores of probabilities of the test and of the unfamiliar images."""
        return scores(known, self.test.y, unfamiliar, self.references)


# ---- methods ---------------------------------------------------------------------------------------------


def plain(cell: Cell, divisor: float = 1.0) -> dict[str, Result]:
    """The network itself, its logits divided by a number."""
    both = (inputs.logits.div(divisor).softmax(1) for inputs in (cell.test, cell.unfamiliar))
    return {"": {"scores": {"network, plug-in": cell.scored(*both)}, "divisor": divisor}}


def tempered(cell: Cell) -> dict[str, Result]:
    """The network with the temperature that is best on the held-out images."""
    return plain(cell, temperature(cell.held_out.logits, cell.held_out.y))


def forecast(post: ll.Posterior, inputs: Inputs, mean: str, covariance: Tensor) -> ll.Predictive:
    """The posterior's prediction in float64, with a covariance of the logits `[n, C, C]` that is known already."""
    lazy = post.predict(inputs.chunks, mean=mean)  # type: ignore[arg-type]
    known = replace(lazy.moments, variance=lambda: covariance.diagonal(dim1=1, dim2=2), covariance=lambda: covariance)
    return replace(lazy, mean=lazy.mean.double(), moments=known)


def naive(cell: Cell, **options: Any) -> dict[str, Result]:
    """At the trained weights, where only the network's mean makes sense."""
    post = cell.fit(evidence_at="trained", **options) if options else cell.naive
    return {"": learnt(post) | predicted(cell, post, [{"network": 1.0}])[0]}


def fitted(cell: Cell, *, calibrated: bool = False, **options: Any) -> dict[str, Result]:
    """At θ⋆; with the scale of the variance learnt on the held-out images beside it if that is asked for."""
    post = cell.fit(**options, held_out=cell.held_out.chunks if calibrated else None)
    scales = [dict.fromkeys(("network", "linear"), 1.0), post.calibration.variance]
    names = ("", ", held out") if calibrated else ("",)
    parts = predicted(cell, post, scales[: len(names)])
    return {name: learnt(post) | part for name, part in zip(names, parts, strict=True)}


def oracle(cell: Cell) -> dict[str, Result]:
    """One precision, the best of a grid for the test labels themselves: not a method, but a bound to compare with."""
    post, curvature = cell.fit(prior="single"), cell.structure.kept
    assert curvature is not None
    prior, ones = post.setting.prior, torch.ones(1, dtype=torch.float64)

    def moved(decades: float) -> ll.Posterior:
        there = prior.at(prior.log_precision + decades * math.log(10))
        return replace(post, setting=replace(post.setting, prior=there), factor=curvature.factor(there, ones))

    some = Inputs(cell.net, [(every(x), every(y)) for x, y in cell.test.chunks])
    grid: dict[float, dict[str, float]] = {}
    for decades in ORACLE:
        there = moved(decades)
        ahead = forecast(there, some, "network", some.covariance(there.factor))
        grid[decades] = {link: -float(log_prob(probs(ahead, link), some.y).mean()) for link in LINKS}
    results = {}
    for link in LINKS:
        best = min(ORACLE, key=lambda decades: grid[decades][link])
        there = moved(best)
        part = predicted(cell, there, [{"network": 1.0}])[0]
        results[f", {link}"] = {"prior": there.prior, "decades": best, "grid": grid} | part
    return results


def every(tensors: Any) -> Any:
    """Some rows of a tensor, or of each of several."""
    return tuple(map(every, tensors)) if isinstance(tensors, tuple) else tensors[::ORACLE_IMAGES]


def predicted(cell: Cell, post: ll.Posterior, choices: list[Mapping[str, float]]) -> list[Result]:
    """Scores of both kinds of probabilities around means whose variance has the scales of each choice."""
    pair = (cell.test, cell.unfamiliar)
    covariances = [inputs.covariance(post.factor) for inputs in pair]
    totals = [covariance.diagonal(dim1=1, dim2=2).sum(1) for covariance in covariances]
    results = []
    for scales in choices:
        found = {}
        for mean, scale in scales.items():
            both = [forecast(post, i, mean, scale * v) for i, v in zip(pair, covariances, strict=True)]
            found |= {f"{mean}, {link}": cell.scored(*(probs(ahead, link) for ahead in both)) for link in LINKS}
        results.append({"scores": found, "scales": dict(scales), "auroc_epistemic": auroc(*totals)})
    return results


def probs(ahead: ll.Predictive, link: str) -> Tensor:
    """Class probabilities `[n, C]`."""
    return ahead.probs(link, samples=SAMPLES)  # type: ignore[arg-type]


def learnt(post: ll.Posterior) -> Result:
    """The numbers of a posterior that its makers look at."""
    return {
        "log_evidence": post.log_evidence,
        "converged": post.status.converged,
        "message": post.status.message,
        "half_steps": len(post.history),
        "effective_dimensions": sum(post.effective_dimensions.values()),
        "prior": post.prior,
    }


def methods(normalised: Sequence[Any]) -> dict[str, Method]:
    """Everything that is measured, by name, what matters most first; without normalised weights two priors are "single"."""
    found: dict[str, Method] = {"plain": plain, "temperature": tempered, "naive, single": naive}
    for prior in ("curvature", "single"):
        for model in MODELS:
            found[f"{prior}, {model}"] = partial(fitted, calibrated=True, prior=prior, model=model)
    found[REFRESHED] = partial(fitted, prior="curvature", model="linear", hessian_at="optimum")
    found["oracle"] = oracle
    found["naive, curvature"] = partial(naive, prior="curvature")
    for prior in ("tensor", "layer", "hyper", "curvature-layer", *(("normalised", "gauge") if normalised else ())):
        for model in MODELS:
            found[f"{prior}, {model}"] = partial(fitted, prior=prior, model=model)
    found["naive, tensor"] = partial(naive, prior="tensor")
    return found


# ---- one network -----------------------------------------------------------------------------------------


def cell_of(which: Which, data: datasets.Folder) -> Cell:
    """The data and the trained network."""
    net = network(which, data)
    train, held_out, test, unfamiliar = (Inputs.of(net, part) for part in images(which, data))
    return Cell(net, train, held_out, test, unfamiliar)


def measure(which: Which, data: datasets.Folder, wanted: list[str]) -> None:
    """Every method that is not yet in the file of this network; written after each."""
    path = FOLDER / f"{which.title}.json"
    content = records.read(path)
    if content and not missing(content, wanted):
        return
    cell = cell_of(which, data)
    if not content:
        content = {"network": asdict(which), "setting": setting(cell, which), "methods": {}, "done": []}
    for name, method in missing(content, wanted).items():
        results = outcome(cell, method)
        content["methods"] |= {name + suffix: result for suffix, result in results.items()}
        content["done"].append(name)
        records.write(path, content)
        for suffix, result in results.items():
            print(f"{which.title:20} {name + suffix:28} {brief(result)}", flush=True)


def missing(content: Mapping[str, Any], wanted: list[str]) -> dict[str, Method]:
    """The methods that are asked for and not done."""
    return {
        name: method
        for name, method in methods(content["setting"]["normalised"]).items()
        if name not in content["done"] and any(text in name for text in wanted)
    }


def setting(cell: Cell, which: Which) -> Result:
    """Images, epochs, and what the plain network achieves."""
    _ = cell.naive  # builds H
    symmetries = ll.inspect(cell.net, cell.train.chunks[0][0], n_data=TRAINING_IMAGES).symmetries
    return {
        "weights": sum(w.numel() for w in cell.net.parameters()),
        "normalised": [list(group.names) for group in symmetries.normalised],
        "training_images": len(cell.train.y),
        "held_out_images": len(cell.held_out.y),
        "test_images": len(cell.test.y),
        "unfamiliar_images": len(cell.unfamiliar.y),
        "epochs": EPOCHS[which.arch],
        "curvature_seconds": cell.structure.seconds,
        "training_nll": float(cross_entropy(cell.train.logits, cell.train.y)),
        "training_accuracy": float((cell.train.logits.argmax(1) == cell.train.y).double().mean()),
    }


def outcome(cell: Cell, method: Method) -> dict[str, Result]:
    """What a method found, what it warned about, and the processor time it took without what is shared."""
    _ = cell.references, cell.test.jacobian, cell.unfamiliar.jacobian  # not to be in the time of one method
    start = time.process_time()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results = method(cell)
    seconds = time.process_time() - start
    kinds = sorted({f"{w.category.__name__}: {w.message}" for w in warned})
    common = {"warnings": kinds, "seconds": round(seconds, 1), "versions": records.versions()}
    return {suffix: result | common for suffix, result in results.items()}


def brief(result: Result) -> str:
    """One line to watch."""
    nll = "  ".join(f"{of} {s['nll']:.3f}/{s['ece']:.3f}" for of, s in result["scores"].items())
    return f"{nll}  {result['seconds']:.0f} s{'' if result.get('converged', True) else '  NOT CONVERGED'}"


# ---- commands --------------------------------------------------------------------------------------------


def add_arguments(command: ArgumentParser) -> None:
    """The flags of `run digits`."""
    datasets.add_data_argument(command)
    command.add_argument("--nets", nargs="+", choices=NETS, default=NETS, help="default: all")
    command.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=[*SEEDS], help="default: all")
    command.add_argument(
        "--methods", nargs="+", metavar="TEXT", default=[""], help="only those whose name has one of these"
    )


def run(arguments: Namespace) -> None:
    """Measure what is not measured yet, the first seed of every network first."""
    for seed in arguments.seeds:
        for name in arguments.nets:
            measure(Which(name, seed), arguments.data, arguments.methods)


table = digits_tables.table
