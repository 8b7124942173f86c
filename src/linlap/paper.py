"""The original's solver for θ⋆, early-stopped Adam, kept so that its tables can be reproduced.

Algorithm 1: Adam from zero with learning rate 1e-4 for 100 epochs, the gradient Jᵀ ∂ℓ(Jθ) + Λθ of a mini-batch by one
Jacobian-vector and one vector-Jacobian product. It is far from converged: a coordinate moves by at most the learning
rate a step. The certificate therefore says so, and F need not fall.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from linlap.alternate import AtOptimum
from linlap.curvature.base import Curvature, Factor
from linlap.evidence import Setting
from linlap.objective import Objective, Point
from linlap.problem import Problem
from linlap.weights import Optimum, trained_start, zero_start


@dataclass(frozen=True)
class PaperSolver(AtOptimum):
    """Adam as in the paper.

    Attributes:
        product: how J·θ is taken: by forward mode, or by central finite differences in the weights.
        start: zero, or the trained weights.
    """

    tolerance: float = 1e-8
    rate: float = 1e-4
    epochs: int = 100
    batch: int = 256
    product: Literal["forward", "finite-differences"] = "forward"
    start: Literal["zero", "trained"] = "zero"

    def first(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor) -> Optimum:
        """From zero, or from the trained weights."""
        begin = zero_start(problem) if self.start == "zero" else trained_start(problem)
        return self.settle(problem, setting, curvature, factor, begin)

    def responses(self, problem: Problem, setting: Setting, point: Point) -> None:
        """The evidence is maximised with the weights held."""

    def follow(self, problem: Problem, setting: Setting, factor: Factor, point: Point, pulls: Tensor | None) -> Point:  # noqa: ARG002
        """Adam alone moves the weights."""
        return point

    def remedy(self, dtype: torch.dtype) -> str:  # noqa: ARG002
        """It is early-stopped by design."""
        return 'give PaperSolver more epochs, or use solver="newton"'

    def settle(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor, point: Point) -> Optimum:  # noqa: ARG002
        """The given number of epochs, from where the weights are."""
        weights = point.weights.clone().requires_grad_()
        adam = torch.optim.Adam([weights], lr=self.rate)
        for _ in range(self.epochs):
            self._epoch(problem, setting, weights, adam)
        final = weights.detach()
        end = Point(final, problem.linear_outputs(final))
        objective = Objective(problem, setting.prior.precision)
        gradient = objective.gradient(end)
        decrement = 0.5 * float(gradient @ factor.solve(gradient))
        value = objective(end)
        converged = decrement <= self.tolerance * abs(value)
        return Optimum(
            end.weights, end.outputs, objective=value, decrement=decrement, passes=self.epochs, converged=converged
        )

    def _epoch(self, problem: Problem, setting: Setting, weights: Tensor, adam: torch.optim.Adam) -> None:
        start = 0
        for whole in problem.batches:
            for begin in range(0, len(whole), self.batch):
                part = whole.rows(begin, begin + self.batch)
                rows = slice(start + begin, start + begin + len(part))
                outputs = problem.offset[rows] + self._pushed(problem, part.inputs, weights.detach())
                residual = problem.likelihood.residual(outputs, problem.targets.rows(rows))
                pulled = problem.linearised.vjp(part.inputs)[1](residual).double()
                share = len(part) / problem.examples
                weights.grad = (pulled / share + setting.prior.precision * weights.detach()) / problem.examples
                adam.step()
            start += len(whole)

    def _pushed(self, problem: Problem, inputs: object, weights: Tensor) -> Tensor:
        """J·weights `[n, C]`."""
        if self.product == "forward":
            return problem.linearised.jvp(inputs, weights)[1].double()
        return finite_differences(problem, inputs, weights)


def finite_differences(problem: Problem, inputs: object, vector: Tensor) -> Tensor:
    """J·vector by central differences, with Andrei's step √ε (1 + ‖θ̃‖∞)/‖v‖∞."""
    network = problem.linearised.network
    largest = float(vector.abs().max())
    if largest == 0:
        return torch.zeros_like(problem.linearised.outputs(inputs)).double()
    step = torch.finfo(network.dtype).eps ** 0.5 * (1 + float(network.trained.abs().max())) / largest
    ends = [
        problem.linearised.outputs_at(network.trained + sign * step * vector.to(network.dtype), inputs)
        for sign in (1, -1)
    ]
    return ((ends[0] - ends[1]) / (2 * step)).double()
