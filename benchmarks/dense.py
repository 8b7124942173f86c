"""The whole curvature of ten thousand images, ten outputs and fifteen thousand weights.

Counted are N·C·P² operations, what a symmetric product of the rows of √W J cannot do without; the floor is this machine's
product of float32 matrices, before and after. The precision that follows is compared with that of a float64 network: from
where the float32 search ended, Newton's method goes on with everything in float64, until it stays where it is.
"""

import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linlap as ll
from benchmarks.floors import peak_bytes, product_rate
from benchmarks.networks import Classifier, first_prior
from experiments import records
from linlap import evidence
from linlap.alternate import AtOptimum, Search, Tolerance
from linlap.curvature.dense import Dense, DenseCurvature
from linlap.evidence import Setting
from linlap.problem import Problem
from linlap.weights import zero_start

CASES = ("float32", "float64")
"""Of the network; the second needs the first one's result."""

NEWTON_STEPS = 2
RESULTS = Path(__file__).parent / "results" / "dense.json"


@dataclass
class Timed(Dense):
    """The dense structure with a watch, for the first matrix that it builds."""

    found: dict[str, Any] = field(default_factory=dict)

    def of(self, problem: Problem, outputs: Tensor) -> DenseCurvature:
        """H, timed."""
        if self.found:
            return super().of(problem, outputs)
        before, start = product_rate(), time.perf_counter()
        curvature = super().of(problem, outputs)
        seconds, peak = time.perf_counter() - start, peak_bytes()
        rate = (before + product_rate()) / 2
        work = problem.examples * problem.outputs * problem.weights**2
        matrix = curvature.sums.nbytes
        self.found = {
            "examples": problem.examples,
            "outputs": problem.outputs,
            "weights": problem.weights,
            "floor_gflops": rate / 1e9,
            "seconds": seconds,
            "share_of_floor": work / seconds / rate,
            "matrix_bytes": matrix,
            "peak_bytes": peak,
            "peak_over_matrix": peak / matrix,
        }
        return curvature


def measure(case: str, data: Any) -> dict[str, Any]:
    """Of float32 the time, the memory and the precision; of float64 how far off that precision was."""
    return {"float32": single, "float64": double}[case](Classifier.named("cnn", data))


def single(classifier: Classifier) -> dict[str, Any]:
    """Time, memory, and the precision they lead to."""
    timed = Timed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        post = ll.fit(
            classifier.net, classifier.batches, "classification", curvature=timed, memory="2GiB", progress=False
        )
    return timed.found | {
        "precision": float(post.setting.prior.log_precision.exp()),
        "log_evidence": post.log_evidence,
        "converged": post.status.converged,
    }


def double(classifier: Classifier) -> dict[str, Any]:
    """Newton's steps in the log precision from where float32 ended."""
    problem = classifier.double().posed()
    curvature = Dense().of(problem, problem.network_outputs)
    began = torch.tensor([records.read(RESULTS)["float32"]["precision"]], dtype=torch.float64).log()
    setting = Setting(first_prior(problem, curvature, "auto").at(began), None, learns_noise=False)
    limits = evidence.bounds(setting.prior, curvature.diagonal().sum(0))
    centre, tolerance = AtOptimum(1e-12), Tolerance.of(torch.float64)
    search = Search(problem, curvature, centre, tolerance, limits)
    point, steps = zero_start(problem), []
    for _ in range(NEWTON_STEPS):
        factor = search.factor(setting)
        point = centre.settle(problem, setting, curvature, factor, point)
        step = evidence.newton(search.slope(setting, factor, point))[0]
        setting = setting.at(setting.z + step)
        steps.append(float(step))
        print("step in log precision", steps[-1], "decrement", point.decrement, flush=True)
    return {"precision": float(setting.prior.log_precision.exp()), "steps": steps, "off_by": abs(sum(steps))}
