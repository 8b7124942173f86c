"""The whole curvature of ten thousand images, ten outputs and fifteen thousand weights.

Counted are N·C·P² operations, what a symmetric product of the rows of √W J cannot do without; the floor is this machine's
product of float32 matrices, before and after. The precision that follows is compared with that of a float64 network.
"""

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import linlap as ll
from benchmarks.floors import peak_bytes, product_rate
from benchmarks.networks import Classifier
from linlap.curvature.dense import Dense, DenseCurvature
from linlap.problem import Problem

CASES = ("float32", "float64")
"""Of the network; the floor is float32's for both."""


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
    """Time, memory, and the precisions they lead to."""
    classifier, timed = Classifier.named("cnn", data), Timed()
    classifier = classifier.double() if case == "float64" else classifier
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        post = ll.fit(
            classifier.net, classifier.batches, "classification", curvature=timed, memory="2GiB", progress=False
        )
    return timed.found | {
        "precision": next(iter(post.setting.prior.log_precision.exp().tolist())),
        "log_evidence": post.log_evidence,
        "converged": post.status.converged,
    }
