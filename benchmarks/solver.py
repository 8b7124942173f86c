"""What θ⋆ and Λ⋆ cost: passes over the data, and factorisations.

Asked of the weights is a Newton decrement of a millionth of the objective, from zero and from the optimum under another Λ, an
e-fold away; of the search all of its precision, from two e-folds away.
"""

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

import linlap as ll
from benchmarks.networks import Classifier
from linlap import evidence
from linlap.alternate import AtOptimum, Found, Search, Tolerance
from linlap.curvature.dense import Dense, DenseCurvature
from linlap.evidence import Setting
from linlap.problem import Problem
from linlap.weights import Optimum, Point, zero_start

CASES = ("cnn", "fixup_resnet", "transformer")
PRIORS = ("auto", "layer")
ENOUGH = 1e-6
"""Decrement, relative to the objective."""

NEIGHBOUR, FAR = 1.0, 2.0
"""E-folds."""


@dataclass
class Kept(Dense):
    """The dense structure, with H at the trained network built once."""

    kept: DenseCurvature | None = None

    def of(self, problem: Problem, outputs: torch.Tensor) -> DenseCurvature:
        """H at the trained network; anew at other outputs."""
        if not torch.equal(outputs, problem.network_outputs):
            return super().of(problem, outputs)
        self.kept = self.kept or super().of(problem, outputs)
        return DenseCurvature(problem, self.kept.sums)


@dataclass(frozen=True)
class Bench:
    """The linear model of a network with its curvature and where the search ends."""

    problem: Problem
    curvature: DenseCurvature
    end: Setting

    def weights(self, setting: Setting, start: Point, tolerance: float = ENOUGH) -> Optimum:
        """θ⋆ under a setting."""
        factor = self.curvature.factor(setting.prior, setting.noise_precision)
        return AtOptimum(tolerance).settle(self.problem, setting, self.curvature, factor, start)

    def at(self, folds: float) -> Setting:
        """All precisions that many e-folds from the end."""
        return self.end.at(self.end.z + folds)

    def search(self, start: Setting) -> Found:
        """Λ⋆ by the library's own tolerance."""
        tolerance = Tolerance.of(torch.float32)
        limits = evidence.bounds(start.prior, self.curvature.diagonal().sum(0))
        centre = AtOptimum(tolerance.weights)
        return Search(self.problem, self.curvature, centre, tolerance, limits).run(start)


def measure(case: str, data: Any) -> dict[str, Any]:
    """Everything about one network."""
    classifier, structure = Classifier.named(case, data), Kept()
    problem = classifier.posed()
    found: dict[str, Any] = {"examples": problem.examples, "weights": problem.weights}
    for prior in PRIORS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"curvature": structure, "prior": prior, "memory": "2GiB", "progress": False}
            post = ll.fit(classifier.net, classifier.batches, "classification", **options)  # type: ignore[arg-type]
        bench = Bench(problem, structure.of(problem, problem.network_outputs), post.setting)
        found[prior] = {"learnt": len(post.setting.z), "precision": post.prior} | by_steps(bench)
        print(case, prior, found[prior], flush=True)
    return found


def by_steps(bench: Bench) -> dict[str, Any]:
    """Passes of the weights' step and factorisations of the evidence's."""
    steps = {"from_zero": bench.weights(bench.end, zero_start(bench.problem))}
    for name, folds in (("from_above", NEIGHBOUR), ("from_below", -NEIGHBOUR)):
        there = bench.weights(bench.at(folds), zero_start(bench.problem), 1e-8)
        steps[name] = bench.weights(bench.end, there)
    counted: dict[str, Any] = {
        name: {"passes": o.passes, "decrement": o.decrement / abs(o.objective), "reached": o.converged}
        for name, o in steps.items()
    }
    for name, folds in (("search_from_above", FAR), ("search_from_below", -FAR)):
        start = time.perf_counter()
        end = bench.search(bench.at(folds))
        apart = float((end.setting.z - bench.end.z).abs().max())
        counted[name] = {
            "factorisations": end.factorisations,
            "converged": end.converged,
            "largest_ratio_to_the_end": math.exp(apart),
            "objective": end.history[-1],
            "seconds": time.perf_counter() - start,
        }
    return counted
