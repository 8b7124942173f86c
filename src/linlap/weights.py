"""θ⋆, the optimum of the linear model's convex loss, by preconditioned Newton with conjugate gradients.

The outputs o = c + Jθ are carried along: a line search then costs no pass over the data, and J·step is a by-product
of the conjugate gradients. The certificate is the Newton decrement ½ gᵀ(JᵀWJ + Λ)⁻¹g, W at θ itself: how far the
objective still is above its minimum, to second order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linlap.curvature.base import Factor
from linlap.preconditioner import Memory, Solve
from linlap.problem import Problem

FORCING = 0.03
"""Conjugate gradients end when an iteration adds no more than this share of the quadratic model's fall."""


ROUNDING = 4 * torch.finfo(torch.float64).eps
"""Relative rise of the objective that is no rise."""


LOST = 1e-9
"""Nats that may be lost in rounding, where the objective does not fall any further."""


@dataclass(frozen=True)
class Point:
    """Weights θ `[P]` with the outputs `[N, C]` they give."""

    weights: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class Optimum(Point):
    """θ⋆ with its certificate."""

    objective: float
    decrement: float
    passes: int
    converged: bool


@dataclass
class Objective:
    """L_h(θ) + ½ ‖θ‖²_Λ."""

    problem: Problem
    precision: Tensor

    def __call__(self, point: Point) -> float:
        """Its value."""
        return self.problem.loss(point.outputs) + 0.5 * float(point.weights @ (self.precision * point.weights))

    def gradient(self, point: Point) -> Tensor:
        """Jᵀr + Λθ, a pass."""
        return self.problem.gradient(point.outputs) + self.precision * point.weights

    def curved(self, point: Point, vector: Tensor) -> tuple[Tensor, Tensor]:
        """J·vector and (JᵀWJ + Λ)·vector with W at a point, a pass."""
        outputs, product = self.problem.curved(point.outputs, vector)
        return outputs, product + self.precision * vector

    def along(self, point: Point, step: Point) -> tuple[float, Point]:
        """The minimum on a line, by safeguarded Newton in one variable; no pass."""
        likelihood, targets = self.problem.likelihood, self.problem.targets
        steep = float(step.weights @ (self.precision * step.weights))
        tilt = float(point.weights @ (self.precision * step.weights))
        low, high, length, before = 0.0, float("inf"), 1.0, float("inf")
        for _ in range(60):
            outputs = point.outputs + length * step.outputs
            slope = float((likelihood.residual(outputs, targets) * step.outputs).sum()) + tilt + length * steep
            bend = float((likelihood.curve(outputs, targets, step.outputs) * step.outputs).sum()) + steep
            low, high = (length, high) if slope < 0 else (low, length)
            proposal = length - slope / bend if bend > 0 else float("inf")
            middle = 2 * length if high == float("inf") else 0.5 * (low + high)
            crawls = abs(slope) > 0.1 * before and proposal > middle  # far out on an exponential
            taken = low < proposal < min(high, 4 * length + 1) and not crawls
            change, before = (proposal if taken else middle) - length, abs(slope)
            if abs(change) <= 1e-6 * length and math.isfinite(slope):
                break
            length += change
        return length, Point(point.weights + length * step.weights, point.outputs + length * step.outputs)


def optimum(
    objective: Objective,
    solver: Callable[[Point], Solve],
    start: Point,
    tolerance: float,
    most_passes: int = 200,
) -> Optimum:
    """Minimise the loss until the decrement is below tolerance × objective; `solver` gives a Σ to go by at a point."""
    problem, point, value = objective.problem, start, objective(start)
    before, memory = problem.passes, Memory(problem.weights, problem.memory)
    decrement = enough = rounding = float("inf")
    for _ in range(50):
        gradient, enough, rounding = objective.gradient(point), tolerance * max(abs(value), 1.0), ROUNDING * abs(value)
        step = newton_step(objective, point, gradient, memory.improving(solver(point)), memory, enough)
        decrement = -0.5 * float(gradient @ step.weights)
        moved = objective.along(point, step)[1]
        fallen = objective(moved)
        if fallen <= value + rounding:
            point = moved
        if decrement <= enough or fallen > value + rounding or problem.passes - before > most_passes:
            break
        value = fallen
    converged = decrement <= max(enough, rounding, LOST)
    return Optimum(
        point.weights, point.outputs, objective(point), max(decrement, 0.0), problem.passes - before, converged
    )


def newton_step(
    objective: Objective, point: Point, gradient: Tensor, solve: Solve, memory: Memory, tiny: float
) -> Point:
    """−(JᵀWJ + Λ)⁻¹ gradient by conjugate gradients, with J times it.

    It ends when the quadratic model's fall in one iteration is a small share of the fall so far, or is tiny itself.
    """
    step, pushed = torch.zeros_like(gradient), torch.zeros_like(point.outputs)
    residual, fallen = -gradient, 0.0
    z = solve(residual)
    direction, rz = z, float(residual @ z)
    for _ in range(30):
        if rz <= 0:
            break
        outputs, product = objective.curved(point, direction)
        length = rz / float(direction @ product)
        memory.add(direction, product)
        step, pushed = step + length * direction, pushed + length * outputs
        residual = residual - length * product
        fall = 0.5 * length * rz
        fallen += fall
        if fall <= FORCING * fallen or fall <= 0.1 * tiny:
            break
        z = solve(residual)
        previous, rz = rz, float(residual @ z)
        direction = z + (rz / previous) * direction
    return Point(step, pushed)


def refined(objective: Objective, factor: Factor, point: Point) -> Solve:
    """Σ·vectors `[P, m]` with W at a point, from a Σ with W elsewhere: some passes for each column."""
    memory = Memory(objective.problem.weights, objective.problem.memory)

    def column(vector: Tensor) -> Tensor:
        return newton_step(objective, point, -vector, memory.improving(factor.solve), memory, 0.0).weights

    return lambda vectors: torch.stack([column(vector) for vector in vectors.mT], 1)


def quadratic_start(objective: Objective, factor: Factor) -> Point:
    """The best multiple of (H + Λ)⁻¹ b, b = Jᵀ(W(f − c) − r) at the network's outputs: the optimum for quadratic losses.

    For an overconfident network W is too small, and that optimum can be far worse than zero; a multiple of it is not.
    """
    problem = objective.problem
    f, likelihood, targets = problem.network_outputs, problem.likelihood, problem.targets
    pulled = likelihood.curve(f, targets, f - problem.offset) - likelihood.residual(f, targets)
    weights = factor.solve(problem.sweeps.backward(pulled))
    return objective.along(zero_start(problem), Point(weights, problem.sweeps.forward(weights)))[1]


def zero_start(problem: Problem) -> Point:
    """θ = 0."""
    return Point(torch.zeros_like(problem.trained), problem.offset)


def trained_start(problem: Problem) -> Point:
    """θ̃."""
    return Point(problem.trained, problem.linear_outputs(problem.trained))
