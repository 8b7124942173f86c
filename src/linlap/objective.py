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
        lengths, first = self._on_the_last(point, directions, span), float("inf")
        for _ in range(MOST_STEPS):
            step, promised = span.newton(lengths)
            first, value = min(first, promised), span.value(lengths)
            limit = value + ROUNDING * abs(value)
            share = next((0.5**i for i in range(12) if span.value(lengths + 0.5**i * step) <= limit), 0.0)
            lengths = lengths + share * step
            if share == 0 or (share == 1 and promised <= 1e-3 * first):
                break
        lengths = lengths / span.sizes
        weights, outputs = point.weights.clone(), point.outputs.clone()
        for length, seen in zip(lengths.tolist(), directions, strict=True):
            weights.add_(seen.step, alpha=length)
            outputs.add_(seen.outputs, alpha=length)
        return lengths, Point(weights, outputs)

    def _on_the_last(self, point: Point, directions: Sequence[Seen], span: "Span") -> Tensor:
        """The minimum on the last direction, which may be far off; zero where that goes up."""
        lengths = torch.zeros_like(span.sizes)
        last = directions[-1]
        lengths[-1] = self.along(point, Point(last.step, last.outputs))[0] * span.sizes[-1]
        return lengths if span.value(lengths) <= span.value(0 * lengths) else 0 * lengths


@dataclass(frozen=True)
class Span:
    """The objective as a function of the lengths along a few directions of unit size ‖s‖_Λ: of the weights no more is needed.

    ‖θ + Σ aᵢsᵢ‖²_Λ = `square` + 2 a·`pulls` + aᵀ `gram` a.
    """

    problem: Problem
    origin: Tensor
    outputs: Tensor
    sizes: Tensor
    gram: Tensor
    pulls: Tensor
    square: float

    @staticmethod
    def of(objective: Objective, origin: Point, directions: Sequence[Seen]) -> "Span":
        """Outputs `[k, N, C]`, and inner products of the weights."""
        steps, precision = [d.step for d in directions], objective.precision
        gram = torch.stack([torch.stack([s @ weighted for s in steps]) for weighted in (precision * s for s in steps)])
        weighted = precision * origin.weights
        sizes = gram.diagonal().sqrt()
        outputs = torch.stack([d.outputs / size for d, size in zip(directions, sizes, strict=True)])
        pulls = torch.stack([s @ weighted for s in steps]) / sizes
        return Span(
            objective.problem,
            origin.outputs,
            outputs,
            sizes,
            gram / sizes / sizes.unsqueeze(1),
            pulls,
            float(origin.weights @ weighted),
        )

    def at(self, lengths: Tensor) -> Tensor:
        """The outputs there."""
        return self.origin + torch.tensordot(lengths, self.outputs, 1)

    def value(self, lengths: Tensor) -> float:
        """The objective there."""
        square = self.square + float(2 * lengths @ self.pulls + lengths @ self.gram @ lengths)
        return self.problem.loss(self.at(lengths)) + 0.5 * square

    def newton(self, lengths: Tensor) -> tuple[Tensor, float]:
        """Newton's step of the lengths, and the fall it promises."""
        likelihood, targets, there = self.problem.likelihood, self.problem.targets, self.at(lengths)
        residual = likelihood.residual(there, targets)
        gradient = torch.tensordot(self.outputs, residual, 2) + self.pulls + self.gram @ lengths
        curved = torch.stack([likelihood.curve(there, targets, o) for o in self.outputs])
        hessian = self.outputs.flatten(1) @ curved.flatten(1).mT + self.gram
        curvatures, axes = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
        kept = curvatures > DEPENDENT * curvatures[-1]
        slopes = axes.mT @ gradient
        step = -axes @ torch.where(kept, slopes / curvatures.where(kept, 1), 0)
        return step, float(-0.5 * gradient @ step)
