"""The search for (θ⋆, Λ⋆, σ⋆): weights and evidence take turns in lowering one objective F.

After a step in z the weights first follow by their quadratic answer −Σ∇F, exact for the Gaussian likelihood, so that
F falls at this half-step already; then they are polished, and where their quadratic answer was too rough for F to
fall, the step is judged after that. F never rises, which is the stopping rule and the check.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from linlap import evidence
from linlap.curvature.base import Curvature, Factor
from linlap.evidence import Setting, Slope, Update
from linlap.likelihood import Gaussian
from linlap.objective import Objective, Point
from linlap.preconditioner import Solve
from linlap.problem import Problem
from linlap.weights import Optimum, optimum, quadratic_start, refined

Report = Callable[[str, float], None]

FEW = 4
"""Learnt precisions for each of which some passes over the data are worth the factorisations they save."""


LOST = 2e-3
"""Nats that may be lost in rounding, where no step lowers F although one was promised."""


@dataclass(frozen=True)
class Tolerance:
    """Relative to |F|: of the θ-step's decrement, and of the fall that the next step in z promises."""

    weights: float
    evidence: float

    @staticmethod
    def of(dtype: torch.dtype) -> "Tolerance":
        """What the network's own rounding allows."""
        return Tolerance(1e-18, 1e-11) if dtype == torch.float64 else Tolerance(1e-8, 1e-7)


class Centre(ABC):
    """Where the evidence is taken: the weights inside F and how they answer a change of Λ and σ."""

    @abstractmethod
    def first(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor) -> Optimum:
        """The weights to begin with."""

    @abstractmethod
    def responses(self, problem: Problem, setting: Setting, point: Point) -> Tensor | None:
        """∂∇_θF/∂z `[P, m]`, None if the weights stay where they are."""

    @abstractmethod
    def follow(self, problem: Problem, setting: Setting, factor: Factor, point: Point, pulls: Tensor | None) -> Point:
        """The weights' quadratic answer to a new setting."""

    @abstractmethod
    def settle(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor, point: Point) -> Optimum:
        """The weights' optimum under a setting, from a start."""

    def solver(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor, point: Point) -> Solve:  # noqa: ARG002
        """Σ of the weights' answer."""
        return factor.solve

    def remedy(self, dtype: torch.dtype) -> str:
        """What to do where the search ends short of its tolerance."""
        if dtype == torch.float64:
            return "bring inputs and targets to unit scale, or choose fewer groups with prior="
        return "use a float64 network for more digits"


@dataclass(frozen=True)
class AtTrained(Centre):
    """θ̃ with the loss of the network itself: the naive method."""

    def first(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor) -> Optimum:
        """θ̃, with the network's own outputs."""
        return self.settle(problem, setting, curvature, factor, Point(problem.trained, problem.network_outputs))

    def responses(self, problem: Problem, setting: Setting, point: Point) -> None:
        """The weights stay."""

    def follow(self, problem: Problem, setting: Setting, factor: Factor, point: Point, pulls: Tensor | None) -> Point:  # noqa: ARG002
        """The weights stay."""
        return point

    def settle(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor, point: Point) -> Optimum:  # noqa: ARG002
        """The weights stay."""
        value = problem.loss(point.outputs) + 0.5 * float(setting.prior.squares(point.weights).sum())
        return Optimum(point.weights, point.outputs, objective=value, decrement=0.0, passes=0, converged=True)


@dataclass(frozen=True)
class AtOptimum(Centre):
    """θ⋆ of the linear model."""

    tolerance: float

    def first(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor) -> Optimum:
        """From the best multiple of the quadratic optimum."""
        start = quadratic_start(Objective(problem, setting.prior.precision), factor)
        return self.settle(problem, setting, curvature, factor, start)

    def responses(self, problem: Problem, setting: Setting, point: Point) -> Tensor | None:
        """Λ_kθ for each log precision, −Jᵀr of its outputs for each log noise variance."""
        prior, weighted = setting.prior, setting.prior.precision * point.weights
        k = len(prior.log_precision)
        columns = torch.zeros(len(weighted), k, dtype=torch.float64, device=weighted.device)
        columns[torch.arange(len(weighted)), prior.learnt] = weighted
        return torch.cat([columns, -self.pulls(problem, setting, point)], 1) if setting.learns_noise else columns

    def pulls(self, problem: Problem, setting: Setting, point: Point) -> Tensor:
        """Jᵀr of the outputs of each noise level `[P, S]`: for one level −Λθ, by stationarity."""
        levels = len(setting.noise_precision)
        if levels == 1:
            return -(setting.prior.precision * point.weights).unsqueeze(1)
        residual = problem.likelihood.residual(point.outputs, problem.targets)
        return problem.sweeps.backward(torch.diag_embed(residual))

    def follow(self, problem: Problem, setting: Setting, factor: Factor, point: Point, pulls: Tensor | None) -> Point:
        """θ − Σ∇F at the new setting, for which Jᵀr only changes by the noise."""
        old = torch.zeros_like(point.weights) if pulls is None else pulls.sum(1)
        weights = point.weights - factor.solve(old + setting.prior.precision * point.weights)
        return Point(weights, problem.linear_outputs(weights))

    def settle(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor, point: Point) -> Optimum:
        """From where the weights are."""

        def solver(there: Point) -> Solve:
            """Σ with W where it is wanted, if that is free; else the Σ at hand."""
            if curvature.moves_freely and not isinstance(problem.likelihood, Gaussian):
                return curvature.at(there.outputs).factor(setting.prior, setting.noise_precision).solve
            return factor.solve

        return optimum(Objective(problem, setting.prior.precision), solver, point, self.tolerance)

    def solver(self, problem: Problem, setting: Setting, curvature: Curvature, factor: Factor, point: Point) -> Solve:
        """With W at θ⋆, the exact answer for every likelihood, unless it would take a pass for each of many precisions."""
        if isinstance(problem.likelihood, Gaussian) and curvature.exact:
            return factor.solve
        if curvature.moves_freely:
            return curvature.at(point.outputs).factor(setting.prior, setting.noise_precision).solve
        affordable = len(setting.z) <= FEW or problem.passes_are_free
        if not affordable:
            return factor.solve
        return refined(Objective(problem, setting.prior.precision), factor, point)


@dataclass
class Found:
    """The end of a search."""

    setting: Setting
    factor: Factor
    optimum: Optimum
    history: list[float]
    converged: bool
    factorisations: int
    message: str


@dataclass
class Search:
    """One search with H frozen."""

    problem: Problem
    curvature: Curvature
    centre: Centre
    tolerance: Tolerance
    limits: tuple[Tensor, Tensor]
    update: Update = "newton"
    most_rounds: int = 60
    report: Report = lambda _what, _value: None
    history: list[float] = field(default_factory=list)
    factorisations: int = 0

    def factor(self, setting: Setting) -> Factor:
        """Factorise H + Λ."""
        self.factorisations += 1
        return self.curvature.factor(setting.prior, setting.noise_precision)

    def run(self, setting: Setting) -> Found:
        """Alternate until the next step promises nothing more."""
        factor = self.factor(setting)
        best = self.centre.first(setting.pose(self.problem), setting, self.curvature, factor)
        self._record(setting, factor, best)
        message, converged = f"stopped after {self.most_rounds} rounds: pass most_rounds= for more", False
        for _ in range(self.most_rounds):
            at = self.slope(setting, factor, best)
            steps = [self._within(setting, step, fall) for step, fall in evidence.proposals(at, self.update)]
            promised = max(fall for _, fall in steps)
            ends = promised <= self.tolerance.evidence * max(1.0, abs(self.history[-1]))
            taken = self._take(setting, best, steps)
            if taken is not None:
                setting, factor, best = taken
            if ends or taken is None:
                message, converged = self._verdict(best, promised, lost=promised > LOST and not ends)
                break
        return Found(setting, factor, best, self.history, converged, self.factorisations, message)

    def slope(self, setting: Setting, factor: Factor, point: Point) -> Slope:
        """F's derivatives at a point, without the numbers that stand at a limit and would leave it."""
        problem = setting.pose(self.problem)
        responses = self.centre.responses(problem, setting, point)
        solve = self.centre.solver(problem, setting, self.curvature, factor, point)
        slope = evidence.slope(problem, setting, factor, point, responses, solve)
        low, high = self._all_limits(setting)
        leaving = ((setting.z >= high) & (slope.gradient < 0)) | ((setting.z <= low) & (slope.gradient > 0))
        return evidence.held(slope, leaving | (low == high))

    def _within(self, setting: Setting, step: Tensor, fall: float) -> tuple[Tensor, float]:
        """The step cut off at the limits."""
        low, high = self._all_limits(setting)
        return (setting.z + step).clamp(low, high) - setting.z, fall

    def _all_limits(self, setting: Setting) -> tuple[Tensor, Tensor]:
        low, high = (torch.cat(pair) for pair in zip(self.limits, self._noise_limits(setting), strict=True))
        return low, high

    def _noise_limits(self, setting: Setting) -> tuple[Tensor, Tensor]:
        """Those of log σ²."""
        if not setting.learns_noise:
            return self.limits[0][:0], self.limits[1][:0]
        least, most = evidence.noise_limits(self.problem, len(setting.noise_precision))
        return least.log(), most.log()

    def _take(
        self, setting: Setting, best: Optimum, steps: list[tuple[Tensor, float]]
    ) -> tuple[Setting, Factor, Optimum] | None:
        """The first step, or shortened step, after which F is lower."""
        pulls = self._pulls(setting, best)
        limit = self.history[-1] + self.tolerance.evidence * max(1.0, abs(self.history[-1]))
        for step, _ in [*steps, *((steps[-1][0] * 0.3**i, 0.0) for i in range(1, 4))]:
            there = setting.at(setting.z + step)
            factor, problem = self.factor(there), there.pose(self.problem)
            ratio = None if pulls is None else pulls * (there.noise_precision / setting.noise_precision)
            followed = self.centre.follow(problem, there, factor, best, ratio)
            value, unmoved = (evidence.objective(problem, there, factor, point) for point in (followed, best))
            start = followed if value <= unmoved else replace(best, pull=None if ratio is None else ratio.sum(1))
            settled = self.centre.settle(problem, there, self.curvature, factor, start)
            if value <= limit:
                self.history.append(value)
            elif evidence.objective(problem, there, factor, settled) > limit:
                continue  # where W has moved far the quadratic answer can be too rough to judge the step by
            self._record(there, factor, settled)
            return there, factor, settled
        return None

    def _pulls(self, setting: Setting, point: Point) -> Tensor | None:
        if not isinstance(self.centre, AtOptimum):
            return None
        return self.centre.pulls(setting.pose(self.problem), setting, point)

    def _record(self, setting: Setting, factor: Factor, point: Point) -> None:
        value = evidence.objective(setting.pose(self.problem), setting, factor, point)
        self.history.append(value)
        self.report("log evidence", -value)

    def _verdict(self, best: Optimum, promised: float, *, lost: bool) -> tuple[str, bool]:
        remedy = self.centre.remedy(self.problem.linearised.network.dtype)
        if lost:
            return f"no step lowered the objective further although {promised:.2g} nats were promised: {remedy}", False
        if not best.converged:
            return f"the weights' optimum is only known to {best.decrement:.2g} nats: {remedy}", False
        return "converged", True
