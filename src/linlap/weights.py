"""θ⋆, the optimum of the linear model's convex loss, in few passes over the data.

Each pass does three things at once: it takes the gradient where the search stands, and pushes one new direction through
the network and back with the W found there. Between passes the objective is minimised in the span of all directions seen
so far, which costs no pass. The new direction is a Newton step by a Σ at hand, made exact on what has been seen. The
certificate is the Newton decrement ½ gᵀ(JᵀWJ + Λ)⁻¹g: how far the objective still is above its minimum, to second order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linlap.curvature.base import Factor
from linlap.objective import ROUNDING, Objective, Point, Seen
from linlap.preconditioner import Memory, Solve
from linlap.problem import Problem

FORCING = 0.03
"""Conjugate gradients end when an iteration adds no more than this share of the quadratic model's fall."""


MOST_PRODUCTS = 30
"""Of conjugate gradients."""

LOST = 1e-9
"""Nats that may be lost in rounding, where the objective does not fall any further."""


@dataclass(frozen=True, kw_only=True)
class Optimum(Point):
    """θ⋆ with its certificate."""

    objective: float
    decrement: float
    passes: int
    converged: bool


def optimum(
    objective: Objective,
    solver: Callable[[Point], Solve],
    start: Point,
    tolerance: float,
    most_passes: int = 200,
) -> Optimum:
    """Minimise the loss until the decrement is below tolerance × objective; `solver` gives a Σ to go by at a point."""
    before, descent, enough = objective.problem.passes, Descent(objective, solver, start), 0.0
    for _ in range(most_passes):
        enough = tolerance * max(abs(descent.value), 1.0)
        descent.look(enough)
        if not descent.moves() or descent.decrement <= enough:
            break
    point, rounding = descent.point, ROUNDING * abs(descent.value)
    return Optimum(
        point.weights,
        point.outputs,
        descent.expected - objective.precision * point.weights,
        objective=descent.value,
        decrement=max(descent.decrement, 0.0),
        passes=objective.problem.passes - before,
        converged=descent.decrement <= max(enough, rounding, LOST),
    )


class Descent:
    """Where the search stands, and what it knows of the gradient there.

    The gradient is known exactly where the last pass took it, which is one move behind; where the search stands it is
    expected from the products seen, unless these are so far off that what is expected is larger than what was found.
    """

    def __init__(self, objective: Objective, solver: Callable[[Point], Solve], start: Point) -> None:
        self.objective, self.solver, self.point, self.value = objective, solver, start, objective(start)
        pull = objective.problem.gradient(start.outputs) if start.pull is None else start.pull
        self.memory, self.solve = Memory(objective.problem), solver(start)
        self.gradient = self.expected = pull + objective.precision * start.weights
        self.left = self.expected, torch.zeros_like(self.expected)
        self.decrement = float("inf")

    def look(self, enough: float) -> None:
        """A pass: the gradient where the search stands, and from its fall along a direction the decrement.

        What is left of the decrement is guessed by Σ, as much larger as the fall fell short of what Σ had promised.
        Where passes are free, conjugate gradients leave next to nothing to guess.
        """
        guide, step = self._direction()
        self.gradient, seen = self.objective.look(self.point, step)
        if not self.gradient.any():
            self.decrement = 0.0
            return
        system = System(self.objective, self.point, -self.gradient)
        system.go(self.memory.add(seen))
        shortfall = -float(guide @ step) / float(step @ self.objective.apply(seen))
        if self.objective.problem.passes_are_free:
            system.solve(self.memory, self.solve, enough)
        left = self.memory.improving(self.solve, self.objective.precision)(system.residual)
        self.decrement = system.fallen + 0.5 * max(1.0, shortfall) * float(system.residual @ left)
        self.left = -system.residual, left

    def _direction(self) -> tuple[Tensor, Tensor]:
        """A gradient to go by, and Σ's Newton step for it: the one expected, else what was left where the last pass was."""
        step = -self.memory.improving(self.solve, self.objective.precision)(self.expected)
        believed = -0.5 * float(self.expected @ step) < self.decrement
        return (self.expected, step) if believed else self.left

    def moves(self) -> bool:
        """To the minimum in the span of all that was seen: unless that is no lower."""
        if self.decrement == 0:
            return False
        objective, point, rounding = self.objective, self.point, ROUNDING * abs(self.value)
        lengths, moved = objective.within(point, self.memory.seen)
        value = objective(moved)
        if value > self.value + rounding:
            return False
        bent = sum(length * seen.product for length, seen in zip(lengths, self.memory.seen, strict=True))
        self.expected = self.gradient + objective.precision * (moved.weights - point.weights) + bent
        self.point, self.value, self.solve = moved, value, self.solver(moved)
        return True


class System:
    """(JᵀWJ + Λ) x = v with W at a point, as far as it is solved."""

    def __init__(self, objective: Objective, point: Point, vector: Tensor) -> None:
        self.objective, self.point, self.residual, self.solution = objective, point, vector, torch.zeros_like(vector)
        self.fallen = 0.0

    def go(self, seen: Seen) -> float:
        """The best length along a direction seen at this point; the fall of ½ xᵀ(JᵀWJ + Λ)x − vᵀx."""
        product, slope = self.objective.apply(seen), float(self.residual @ seen.step)
        length = slope / float(seen.step @ product)
        self.solution, self.residual = self.solution + length * seen.step, self.residual - length * product
        self.fallen += 0.5 * length * slope
        return 0.5 * length * slope

    def solve(self, memory: Memory, solve: Solve, tiny: float) -> None:
        """Conjugate gradients, until a pass adds a small share of the fall so far, or next to nothing.

        Directions are conjugate to those before because the Σ they come from is exact on them.
        """
        for _ in range(MOST_PRODUCTS):
            direction = memory.improving(solve, self.objective.precision)(self.residual)
            if float(self.residual @ direction) <= 0:
                break
            fall = self.go(memory.add(self.objective.seen(self.point, direction)))
            if fall <= FORCING * self.fallen or fall <= 0.1 * tiny:
                break


def refined(objective: Objective, factor: Factor, point: Point) -> Solve:
    """Σ·vectors `[P, m]` with W at a point, from a Σ with W elsewhere: some passes for each column."""
    memory = Memory(objective.problem)

    def column(vector: Tensor) -> Tensor:
        system = System(objective, point, vector)
        system.solve(memory, factor.solve, 0.0)
        return system.solution

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
