"""The convex objective of the weights, and what of it costs no pass over the data.

The outputs o = c + Jθ are carried along with the weights, and J·s with every direction s that was ever pushed through the
network. Minimising on a line, or in the span of such directions, then costs no pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linlap.problem import Problem

ROUNDING = 4 * torch.finfo(torch.float64).eps
"""Relative rise of the objective that is no rise."""

MOST_STEPS = 20
"""Of Newton's method in a span."""

DEPENDENT = 1e-13
"""Share of the largest curvature in a span below which a direction is a sum of the others."""


@dataclass(frozen=True)
class Point:
    """Weights θ `[P]` with the outputs `[N, C]` they give, and their pull Jᵀr `[P]` where that is known."""

    weights: Tensor
    outputs: Tensor
    pull: Tensor | None = None


@dataclass(frozen=True)
class Seen:
    """A direction s `[P]` with J s `[N, C]` and JᵀWJ s `[P]`, W where it was seen."""

    step: Tensor
    outputs: Tensor
    product: Tensor


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

    def seen(self, point: Point, step: Tensor) -> Seen:
        """What a direction does with W at a point, a pass."""
        return Seen(step, *self.problem.curved(point.outputs, step))

    def apply(self, seen: Seen) -> Tensor:
        """(JᵀWJ + Λ)·s."""
        return seen.product + self.precision * seen.step

    def look(self, point: Point, step: Tensor) -> tuple[Tensor, Seen]:
        """Jᵀr + Λθ, and what a direction does with W at the point: one pass for all."""
        pull, outputs, product = self.problem.pulled_and_curved(point.outputs, step)
        return pull + self.precision * point.weights, Seen(step, outputs, product)

    def along(self, point: Point, step: Point) -> tuple[float, Point]:
        """The minimum on a line that goes down, by safeguarded Newton in one variable; no pass."""
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

    def within(self, point: Point, directions: Sequence[Seen]) -> tuple[Tensor, Point]:
        """Lengths `[k]` along directions to the minimum in their span, by damped Newton from the last; no pass."""
        span = Span.of(self, point, directions)
        lengths, first = span.on_the_last(), float("inf")
        for _ in range(MOST_STEPS):
            step, promised = span.newton(lengths)
            first, value = min(first, promised), span.value(lengths)
            limit = value + ROUNDING * abs(value)
            share = next((0.5**i for i in range(12) if span.value(lengths + 0.5**i * step) <= limit), 0.0)
            lengths = lengths + share * step
            if share == 0 or (share == 1 and promised <= 1e-3 * first):
                break
        return lengths / span.sizes, span.at(lengths)


@dataclass(frozen=True)
class Span:
    """The objective as a function of the lengths along a few directions of unit size ‖s‖_Λ."""

    objective: Objective
    origin: Point
    steps: Tensor
    outputs: Tensor
    sizes: Tensor

    @staticmethod
    def of(objective: Objective, origin: Point, directions: Sequence[Seen]) -> "Span":
        """Steps `[k, P]`, outputs `[k, N, C]`."""
        sizes = torch.stack([(d.step @ (objective.precision * d.step)).sqrt() for d in directions])
        steps = torch.stack([d.step / size for d, size in zip(directions, sizes, strict=True)])
        outputs = torch.stack([d.outputs / size for d, size in zip(directions, sizes, strict=True)])
        return Span(objective, origin, steps, outputs, sizes)

    def at(self, lengths: Tensor) -> Point:
        """Where that is."""
        pushed = torch.tensordot(lengths, self.outputs, 1)
        return Point(self.origin.weights + lengths @ self.steps, self.origin.outputs + pushed)

    def value(self, lengths: Tensor) -> float:
        """The objective there."""
        return self.objective(self.at(lengths))

    def on_the_last(self) -> Tensor:
        """The minimum on the last direction, which may be far off; zero where that goes up."""
        lengths = torch.zeros_like(self.sizes)
        there = self.objective.along(self.origin, Point(self.steps[-1], self.outputs[-1]))
        lengths[-1] = there[0]
        return lengths if self.value(lengths) <= self.objective(self.origin) else 0 * lengths

    def newton(self, lengths: Tensor) -> tuple[Tensor, float]:
        """Newton's step of the lengths, and the fall it promises."""
        problem, there = self.objective.problem, self.at(lengths)
        residual = problem.likelihood.residual(there.outputs, problem.targets)
        gradient = torch.tensordot(self.outputs, residual, 2) + self.steps @ (self.objective.precision * there.weights)
        curved = torch.stack([problem.likelihood.curve(there.outputs, problem.targets, o) for o in self.outputs])
        hessian = self.outputs.flatten(1) @ curved.flatten(1).mT
        hessian = hessian + (self.steps * self.objective.precision) @ self.steps.mT
        curvatures, axes = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
        kept = curvatures > DEPENDENT * curvatures[-1]
        slopes = axes.mT @ gradient
        step = -axes @ torch.where(kept, slopes / curvatures.where(kept, 1), 0)
        return step, float(-0.5 * gradient @ step)
