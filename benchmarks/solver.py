"""What θ⋆ and Λ⋆ cost: passes over the data, and factorisations.

Asked of the weights is a Newton decrement of a millionth of the objective, from zero and from the optimum under another Λ, an
e-fold away; of the search all of its precision, from two e-folds away.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.networks import Classifier, first_prior
from linlap import evidence
from linlap.alternate import AtOptimum, Found, Search, Tolerance
from linlap.curvature.dense import Dense, DenseCurvature
from linlap.evidence import Setting
from linlap.objective import Objective, Point
from linlap.preconditioner import Memory
from linlap.problem import Problem, Streamed
from linlap.weights import Optimum, System, zero_start

CASES = ("cnn auto", "fixup_resnet auto", "transformer auto", "cnn layer", "fixup_resnet layer", "transformer layer")
"""Networks and priors."""

ENOUGH = 1e-6
"""Decrement, relative to the objective."""

NEIGHBOUR, FAR = 1.0, 2.0
"""E-folds."""


LARGEST = 3 * 2**30
"""Bytes of a Jacobian that is held in memory."""


@dataclass
class Held(Streamed):
    """The Jacobian in memory, each sweep counted as the pass it would be: where a pass takes long, counting need not."""

    jacobian: Tensor = field(kw_only=True)

    @staticmethod
    def of(problem: Problem) -> "Held":
        """The same sweeps."""
        parts = [j for _, j in problem.sweeps.jacobians(200)]
        return Held(problem.linearised, problem.batches, problem.outputs, jacobian=torch.cat(parts))

    def forward(self, vectors: Tensor) -> Tensor:
        """J·vectors."""
        self.passes += 1
        return (self.jacobian @ vectors.to(self.jacobian.dtype)).double()

    def backward(self, outputs: Tensor) -> Tensor:
        """Jᵀ·outputs."""
        self.passes += 1
        return (self.jacobian.flatten(0, 1).mT @ outputs.flatten(0, 1).to(self.jacobian.dtype)).double()

    def there_and_back(self, vector: Tensor, curve: Callable[[slice, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Both, as one pass."""
        pushed = self.forward(vector)
        self.passes -= 1
        return pushed, self.backward(curve(slice(0, len(pushed)), pushed))


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


def measure(case: str, data: Any) -> Iterator[dict[str, Any]]:
    """Everything about one network under one prior, the steps of the weights first: each search takes as long as they."""
    name, structure = case.split()
    problem = Classifier.named(name, data).posed()
    if problem.network_outputs.numel() * problem.weights * 4 <= LARGEST:
        problem = replace(problem, sweeps=Held.of(problem))
    curvature = Dense().of(problem, problem.network_outputs)
    bench = Bench(problem, curvature, Setting(first_prior(problem, curvature, structure), None, learns_noise=False))
    found = bench.search(bench.end)
    bench = Bench(problem, curvature, found.setting)
    about = {"examples": problem.examples, "weights": problem.weights, "learnt": len(found.setting.z)}
    yield about | {"own_start": cost(bench, found)}
    yield from by_steps(bench)
    for name, folds in (("search_from_above", FAR), ("search_from_below", -FAR)):
        yield {name: cost(bench, bench.search(bench.at(folds)))}


def cost(bench: Bench, end: Found) -> dict[str, Any]:
    """Of a search, and whether it found the same."""
    apart = float((end.setting.z - bench.end.z).abs().max())
    return {
        "factorisations": end.factorisations,
        "converged": end.converged,
        "largest_ratio_to_the_end": math.exp(apart),
        "objective": end.history[-1],
    }


def counts(bench: Bench, end: Optimum) -> dict[str, Any]:
    """Of a step of the weights: what it says of itself, and the decrement by conjugate gradients afterwards."""
    objective, point = Objective(bench.problem, bench.end.prior.precision), Point(end.weights, end.outputs)
    system = System(objective, point, -objective.gradient(point))
    factor = bench.curvature.factor(bench.end.prior, bench.end.noise_precision)
    system.solve(Memory(bench.problem), factor.solve, 0.0)
    own = {"passes": end.passes, "decrement": end.decrement / abs(end.objective), "reached": end.converged}
    return own | {"decrement_measured": system.fallen / abs(end.objective)}


def by_steps(bench: Bench) -> Iterator[dict[str, Any]]:
    """Passes of the weights' step: from zero, as a fit begins, and from the optima on either side."""
    zero = zero_start(bench.problem)
    yield {"from_zero": counts(bench, bench.weights(bench.end, zero))}
    factor = bench.curvature.factor(bench.end.prior, bench.end.noise_precision)
    before = bench.problem.passes
    end = AtOptimum(ENOUGH).first(bench.problem, bench.end, bench.curvature, factor)
    yield {"as_fit_begins": counts(bench, replace(end, passes=bench.problem.passes - before))}
    for name, folds in (("from_above", NEIGHBOUR), ("from_below", -NEIGHBOUR)):
        there = bench.weights(bench.at(folds), zero, 1e-8)
        yield {name: counts(bench, bench.weights(bench.end, there))}
