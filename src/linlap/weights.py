"""θ⋆, the optimum of the linear model's convex loss, by preconditioned Newton with conjugate gradients.

The outputs o = c + Jθ are carried along: a line search then costs no pass over the data, and J·step is a by-product
of the conjugate gradients. The certificate is the Newton decrement ½ gᵀ(JᵀWJ + Λ)⁻¹g, W at θ itself: how far the
objective still is above its minimum, to second order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linlap.curvature.base import Curvature, Factor
from linlap.prior import Prior
from linlap.problem import Problem

Solve = Callable[[Tensor], Tensor]
"""Σ·vectors, `[P]` or `[P, m]`."""


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

    def along(self, point: Point, step: Point) -> tuple[float, Point]:
        """The minimum on a line, by safeguarded Newton in one variable; no pass."""
        likelihood, targets = self.problem.likelihood, self.problem.targets
        steep = float(step.weights @ (self.precision * step.weights))
        tilt = float(point.weights @ (self.precision * step.weights))
        low, high, length = 0.0, float("inf"), 1.0
        for _ in range(30):
            outputs = point.outputs + length * step.outputs
            slope = float((likelihood.residual(outputs, targets) * step.outputs).sum()) + tilt + length * steep
            bend = float((likelihood.curve(outputs, targets, step.outputs) * step.outputs).sum()) + steep
            low, high = (length, high) if slope < 0 else (low, length)
            proposal = length - slope / bend if bend > 0 else float("inf")
            middle = 2 * length if high == float("inf") else 0.5 * (low + high)
            change = (proposal if low < proposal < min(high, 4 * length + 1) else middle) - length
            if abs(change) <= 1e-6 * length:
                break
            length += change
        return length, Point(point.weights + length * step.weights, point.outputs + length * step.outputs)


def optimum(  # noqa: PLR0913
    problem: Problem,
    prior: Prior,
    curvature: Curvature,
    factor: Factor,
    starts: list[Point],
    tolerance: float,
    most_passes: int = 200,
) -> Optimum:
    """Minimise the loss from the best of the starts until the decrement is below tolerance × objective."""
    objective = Objective(problem, prior.precision)
    point = min(starts, key=objective)
    before, value, memory = problem.passes, objective(point), Memory()
    decrement, converged = float("inf"), False
    for _ in range(50):
        gradient = objective.gradient(point)
        solve = _preconditioner(problem, prior, curvature, factor, point)
        step = newton_step(problem, prior, point, gradient, memory.improving(solve), memory, tolerance * abs(value))
        decrement = -0.5 * float(gradient @ step.weights)
        moved = objective.along(point, step)[1]
        fallen = objective(moved)
        if fallen <= value:
            point, value = moved, fallen
        converged = decrement <= tolerance * max(abs(value), 1e-300)
        if converged or fallen > value or problem.passes - before > most_passes:
            break
    return Optimum(point.weights, point.outputs, value, max(decrement, 0.0), problem.passes - before, converged)


def _preconditioner(problem: Problem, prior: Prior, curvature: Curvature, factor: Factor, point: Point) -> Solve:
    """Σ with W where it is wanted, if that is free; else the Σ at hand."""
    if curvature.moves_freely and problem.likelihood.output_precision is None:
        return curvature.at(point.outputs).factor(prior, torch.ones(1, dtype=torch.float64)).solve
    return factor.solve


class Memory:
    """Products of recent conjugate-gradient directions, which correct the preconditioner (limited-memory BFGS)."""

    most = 12

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, step: Tensor, product: Tensor) -> None:
        """Remember a direction and its product with the Hessian."""
        self.pairs = [*self.pairs, (step, product)][-self.most :]

    def improving(self, solve: Solve) -> Solve:
        """The preconditioner, made exact on the remembered directions."""
        pairs = list(self.pairs)

        def corrected(vector: Tensor) -> Tensor:
            shares = []
            for s, y in reversed(pairs):
                share = (s @ vector) / (s @ y)
                vector = vector - share * y
                shares.append(share)
            vector = solve(vector)
            for (s, y), share in zip(pairs, reversed(shares), strict=True):
                vector = vector + (share - (y @ vector) / (s @ y)) * s
            return vector

        return corrected if pairs else solve


def newton_step(  # noqa: PLR0913
    problem: Problem, prior: Prior, point: Point, gradient: Tensor, solve: Solve, memory: Memory, tiny: float
) -> Point:
    """−(JᵀWJ + Λ)⁻¹ gradient by conjugate gradients, with J times it.

    It ends when the quadratic model's fall in one iteration is a hundredth of the fall so far, or is tiny itself.
    """
    step, pushed = torch.zeros_like(gradient), torch.zeros_like(point.outputs)
    residual, fallen = -gradient, 0.0
    z = solve(residual)
    direction, rz = z, float(residual @ z)
    for _ in range(30):
        if rz <= 0:
            break
        outputs, product = problem.curved(point.outputs, direction)
        product = product + prior.precision * direction
        bend = float(direction @ product)
        length = rz / bend
        memory.add(direction, product)
        step, pushed = step + length * direction, pushed + length * outputs
        residual = residual - length * product
        fall = 0.5 * length * rz
        fallen += fall
        if fall <= 0.01 * fallen or fall <= 0.1 * tiny:
            break
        z = solve(residual)
        previous, rz = rz, float(residual @ z)
        direction = z + (rz / previous) * direction
    return Point(step, pushed)


def refined(problem: Problem, prior: Prior, factor: Factor, point: Point) -> Solve:
    """Σ·vectors `[P, m]` with W at a point, from a Σ with W elsewhere: some passes for each column."""
    memory = Memory()

    def column(vector: Tensor) -> Tensor:
        return newton_step(problem, prior, point, -vector, memory.improving(factor.solve), memory, 0.0).weights

    return lambda vectors: torch.stack([column(vector) for vector in vectors.mT], 1)


def quadratic_start(problem: Problem, factor: Factor) -> Point:
    """(H + Λ)⁻¹ b with b = Jᵀ(W(f − c) − r) at the network's outputs: the optimum for quadratic losses."""
    f = problem.network_outputs
    likelihood, targets = problem.likelihood, problem.targets
    pulled = likelihood.curve(f, targets, f - problem.offset) - likelihood.residual(f, targets)
    weights = factor.solve(problem.sweeps.backward(pulled))
    return Point(weights, problem.linear_outputs(weights))


def zero_start(problem: Problem) -> Point:
    """θ = 0."""
    return Point(torch.zeros_like(problem.trained), problem.offset)


def trained_start(problem: Problem) -> Point:
    """θ̃."""
    return Point(problem.trained, problem.linear_outputs(problem.trained))
