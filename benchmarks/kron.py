"""The log evidence as a function of one precision, with the whole curvature, its exact blocks, EKFAC and KFAC.

On the paper's residual network. θ⋆ is the same for all at a given precision, so that the curves differ by log det(I + H/λ) alone;
what is asked is where each has its maximum.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.networks import Classifier
from experiments import records
from linlap import prior as priors
from linlap.curvature.dense import Dense, DenseCurvature
from linlap.curvature.kron import Kron
from linlap.curvature.rotated import RotatedCurvature
from linlap.objective import Objective, Point
from linlap.problem import Problem
from linlap.uses.outer import Side
from linlap.weights import optimum, zero_start

CASES = ("resnet",)

LOG10_PRECISIONS = [0.25 * i for i in range(2, 15)]

ENOUGH = 1e-6
"""Decrement of the weights, relative to the objective."""

LABELS = {"full": "whole", "block": "exact blocks", "ekfac": "EKFAC", "kfac": "KFAC"}


def measure(case: str, data: Any) -> dict[str, Any]:
    """The curves, and where each is highest."""
    problem = Classifier.named(case, data).posed()
    dense = Dense().of(problem, problem.network_outputs)
    kron = Kron().of(problem, problem.network_outputs)
    spectra = {"block": of_blocks(dense.sums[0], kron), "ekfac": kron.along[0], "kfac": of_factors(kron)}
    curves: dict[str, list[float]] = {name: [] for name in LABELS}
    point = zero_start(problem)
    for exponent in reversed(LOG10_PRECISIONS):
        point, fit, whole = at(problem, dense, 10.0**exponent, point)
        found = {name: float(torch.log1p(s.clamp(min=0) / 10.0**exponent).sum()) for name, s in spectra.items()}
        for name, log_determinant in ({"full": whole} | found).items():
            curves[name].insert(0, fit - 0.5 * log_determinant)
        print(exponent, {name: round(values[0], 1) for name, values in curves.items()}, flush=True)
    best = {name: peak(LOG10_PRECISIONS, values) for name, values in curves.items()}
    return {
        "examples": problem.examples,
        "weights": problem.weights,
        "log10_precisions": LOG10_PRECISIONS,
        "log_evidence": curves,
        "best_precision": {name: 10**b for name, b in best.items()},
        "trace": {name: float(s.sum()) for name, s in ({"full": dense.diagonal()[0]} | spectra).items()},
    }


def at(problem: Problem, dense: DenseCurvature, precision: float, start: Point) -> tuple[Point, float, float]:
    """θ⋆ under a precision, the evidence without its determinant, and log det(I + H/λ)."""
    layout, ones = problem.linearised.network.layout, torch.ones(problem.weights, dtype=torch.float64)
    one = priors.build("single", layout, [], ones, problem.trained, 1.0)
    prior = one.at(torch.full_like(one.log_precision, math.log(precision)))
    factor = dense.factor(prior, torch.ones(1, dtype=torch.float64))
    objective = Objective(problem, prior.precision)
    end = optimum(objective, lambda _: factor.solve, Point(start.weights, start.outputs), ENOUGH)
    return end, -end.objective, factor.log_determinant


def of_blocks(curvature: Tensor, kron: RotatedCurvature) -> Tensor:
    """Eigenvalues of the exact diagonal blocks, one for each weight tensor."""
    return torch.cat([torch.linalg.eigvalsh(curvature[b.place, b.place]) for b in kron.blocks])


def of_factors(kron: RotatedCurvature) -> Tensor:
    """Eigenvalues of Kronecker products of the sides' second moments (KFAC, expanded); of small blocks, the exact ones."""
    sums: dict[tuple[str, Side], Tensor] = {}
    counts: dict[str, int] = {}
    entered: dict[str, int] = {}
    own = [b for b in kron.blocks if b.kind == "kron"]
    for _, _, terms in kron.passes():
        for block in own:
            term = terms[block.name]
            sides: list[Side] = ["left"]
            if entered.get(block.name) != term.right.data_ptr():  # the same for every column
                entered[block.name] = term.right.data_ptr()
                counts[block.name] = counts.get(block.name, 0) + term.right.shape[0] * term.right.shape[1]
                sides.append("right")
            for side in sides:
                moment = term.moment(side)
                sums[block.name, side] = sums.get((block.name, side), torch.zeros_like(moment)) + moment
    values = kron.along[0].clone()
    for block in own:
        left, right = (torch.linalg.eigvalsh(sums[block.name, side]) for side in ("left", "right"))
        values[block.place] = (left.unsqueeze(-1) * right.unsqueeze(-2) / counts[block.name]).flatten()
    return values


def peak(places: list[float], values: list[float]) -> float:
    """Where a parabola through the highest point and its neighbours is highest."""
    i = max(range(1, len(values) - 1), key=values.__getitem__)
    left, middle, right = values[i - 1 : i + 2]
    return places[i] + 0.5 * (places[i + 1] - places[i]) * (left - right) / (left - 2 * middle + right)


def plot(results: Path) -> None:
    """The curves, with their maxima."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    for case, found in records.read(results / "kron.json").items():
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        for name, label in LABELS.items():
            best = found["best_precision"][name]
            line = axes.plot(
                [10**e for e in found["log10_precisions"]],
                found["log_evidence"][name],
                label=f"{label}, best {best:.3g}",
            )[0]
            axes.axvline(best, color=line.get_color(), linewidth=0.8, linestyle=":")
        axes.set(
            xscale="log",
            xlabel="precision λ",
            ylabel="log evidence at θ⋆ [nats]",
            title=f"{case}, {found['weights']:,} weights",
        )
        axes.legend(title="curvature")
        figure.savefig(results / f"kron-{case}.png", dpi=110)
