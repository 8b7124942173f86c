"""The objective F(θ, Λ, σ) and the step in z = (log λ_1 …, log σ_1² …) that lowers it.

F = L_h(θ) + ½‖θ‖²_Λ + ½ log det(I + Λ⁻¹H) is minus the log evidence, all constants in. J and the W of H are frozen.
For fixed θ it is convex in z. The step is Newton's on the *profile* min_θ F, whose Hessian is F_zz − Uᵀ Σ U with
U = ∂²F/∂θ∂z: the answer of θ⋆ to a change of z.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from linlap.curvature.base import Factor
from linlap.likelihood import Gaussian
from linlap.objective import Point
from linlap.preconditioner import Solve
from linlap.prior import Prior
from linlap.problem import Problem

Update = Literal["newton", "mackay", "sqrt-mackay"]
PRUNED = 0.05
"""Effective dimensions below which a group that is on its way out is sent there."""

RETURNED = 0.5
"""Effective dimensions to which a group comes back that was sent away too soon."""

LEAST_NOISE, MOST_NOISE = 1e-10, 1e3
"""Limits of σ²: relative to the targets' variance, below which rounding takes the place of noise, and to their mean square."""

FLATTEST, LEAST_TURN = 1e-10, 1e-2
"""Least bends of the profile, upwards and downwards, relative to that of F for fixed weights."""

LONGEST = 2.0
"""Longest step in a log precision, in e-folds."""


@dataclass(frozen=True)
class Setting:
    """Λ and σ: a prior, the noise standard deviations `[K]` (none if the likelihood has none) and whether they are learnt."""

    prior: Prior
    noise: Tensor | None
    learns_noise: bool

    @property
    def noise_precision(self) -> Tensor:
        """τ `[K]`, one where there is no noise."""
        device = self.prior.log_precision.device
        return torch.ones(1, dtype=torch.float64, device=device) if self.noise is None else self.noise**-2

    @property
    def z(self) -> Tensor:
        """The learnt logs."""
        if self.learns_noise and self.noise is not None:
            return torch.cat([self.prior.log_precision, 2 * self.noise.log()])
        return self.prior.log_precision

    def at(self, z: Tensor) -> "Setting":
        """The setting with other logs."""
        k = len(self.prior.log_precision)
        noise = (0.5 * z[k:]).exp() if self.learns_noise else self.noise
        return Setting(self.prior.at(z[:k]), noise, self.learns_noise)

    def pose(self, problem: Problem) -> Problem:
        """The problem under this noise."""
        likelihood = problem.likelihood
        return (
            problem.at(likelihood.at(self.noise))
            if isinstance(likelihood, Gaussian) and self.noise is not None
            else problem
        )


@dataclass(frozen=True)
class Terms:
    """What F's derivatives are made of: quadratic penalties q `[K]`, squared residuals in units of σ² and counts `[S]`."""

    quadratic: Tensor
    residual: Tensor
    count: Tensor


def noise_limits(problem: Problem, levels: int) -> tuple[Tensor, Tensor]:
    """Least and greatest σ² of each noise level `[K]`: they move with the units of its outputs, the least not with an offset."""
    values, weight = problem.targets.values, problem.targets.weight
    total = weight.sum(0)
    mean = (weight * values).sum(0) / total
    spread, size = ((weight * (values - m) ** 2).sum(0) / total for m in (mean, torch.zeros_like(mean)))
    if levels == 1:
        spread, size = spread.mean().reshape(1), size.mean().reshape(1)
    least = torch.where(spread > 0, spread, size).clamp(min=1e-300) * LEAST_NOISE
    return least, size.clamp(min=1e-300) * MOST_NOISE


def objective(problem: Problem, setting: Setting, factor: Factor, point: Point) -> float:
    """F."""
    quadratic = float(setting.prior.squares(point.weights).sum())
    return problem.loss(point.outputs) + 0.5 * quadratic + 0.5 * factor.log_determinant + setting.prior.penalty()[0]


def terms(problem: Problem, setting: Setting, point: Point) -> Terms:
    """The terms of the derivatives at a point."""
    quadratic = setting.prior.squares(point.weights)
    if not setting.learns_noise or not isinstance(problem.likelihood, Gaussian):
        return Terms(quadratic, quadratic.new_zeros(0), quadratic.new_zeros(0))
    squares = problem.likelihood.squares(point.outputs, problem.targets)
    counts = problem.targets.weight.sum().expand(len(squares))
    levels = len(setting.noise_precision)
    by_level = (lambda v: v) if levels == len(squares) else (lambda v: v.sum().reshape(1))
    return Terms(quadratic, by_level(squares) * setting.noise_precision, by_level(counts))


@dataclass(frozen=True)
class Slope:
    """F's derivatives in z: gradient, Hessian for fixed θ, Hessian of the profile, and γ of each learnt number."""

    gradient: Tensor
    fixed: Tensor
    profile: Tensor
    kept: Tensor
    tied: Tensor
    terms: Terms


def slope(
    problem: Problem, setting: Setting, factor: Factor, point: Point, responses: Tensor | None, solve: Solve
) -> Slope:
    """Derivatives at a point; `responses` U `[P, m]` are those of ∇_θF in z, None where θ does not answer; it does by `solve`."""
    sensitivities, parts = factor.sensitivities(), terms(problem, setting, point)
    m = len(setting.z)
    _, pull, stiffness = setting.prior.penalty()
    kept = -sensitivities.gradient[:m]
    own = torch.cat([parts.quadratic, parts.residual])
    gradient = 0.5 * (torch.cat([parts.quadratic, parts.count - parts.residual]) - kept)
    fixed = 0.5 * (torch.diag(own) + sensitivities.hessian[:m, :m])
    k = len(parts.quadratic)
    tied = torch.zeros_like(gradient)
    tied[:k] = stiffness.diagonal().to(tied.device)
    gradient[:k] += pull.to(gradient.device)
    fixed[:k, :k] += stiffness.to(fixed.device)
    profile = fixed if responses is None else fixed - responses.mT @ solve(responses)
    return Slope(gradient, fixed, 0.5 * (profile + profile.mT), kept, tied, parts)


def held(at: Slope, mask: Tensor) -> Slope:
    """The slope without the numbers that stand at a limit and would leave it."""
    free = (~mask).double()
    both = free * free.unsqueeze(1)
    alone = torch.diag(1 - free)
    return replace(at, gradient=at.gradient * free, fixed=at.fixed * both + alone, profile=at.profile * both + alone)


def newton(at: Slope) -> tuple[Tensor, float]:
    """The Newton step of the profile and the fall it promises; where the profile bends down, by the bend's size."""
    scale = at.fixed.diagonal().clamp(min=1e-300).rsqrt()
    bends, vectors = torch.linalg.eigh(at.profile * scale * scale.unsqueeze(1))
    bends = torch.where(bends > 0, bends.clamp(min=FLATTEST), (-bends).clamp(min=LEAST_TURN))
    along = vectors.mT @ (scale * at.gradient)
    return -scale * (vectors @ (along / bends)), 0.5 * float((along**2 / bends).sum())


def bounded(at: Slope) -> tuple[Tensor, float]:
    """MacKay's step log(γ/q) in its Padé form 2(γ − q)/(γ + q): same fixed point, downhill, never above two e-folds."""
    k = len(at.terms.quadratic)
    sizes = torch.cat(
        [at.kept[:k].abs() + at.terms.quadratic, (at.terms.count - at.kept[k:]).abs() + at.terms.residual]
    )
    step = -at.gradient / (0.25 * sizes + at.tied).clamp(min=1e-300)
    return step.clamp(-LONGEST, LONGEST), 0.5 * float(-(step * at.gradient).sum())


def mackay(at: Slope) -> tuple[Tensor, float]:
    """MacKay's fixed point λ ← γ/‖θ‖², σ² ← RSS/(N − γ)."""
    k = len(at.terms.quadratic)
    step = torch.cat(
        [
            (at.kept[:k].clamp(min=1e-300) / at.terms.quadratic.clamp(min=1e-300)).log(),
            (at.terms.residual / (at.terms.count - at.kept[k:]).clamp(min=1e-300)).log(),
        ]
    )
    return step.clamp(-10, 10), 0.5 * float(-(step * at.gradient).sum())


def _leaping(at: Slope, step: tuple[Tensor, float]) -> tuple[Tensor, float]:
    """Move precisions of groups that are all but pruned at once, where F is nearly flat.

    Out there γ and q are both inversely proportional to the precision. If q < γ, F falls to the limit, by at most
    ½γ. If q > γ, the group is wanted back: F falls by ½(q/γ − 1) of the effective dimensions it returns to.
    """
    k = len(at.terms.quadratic)
    kept, quadratic = at.kept[:k], at.terms.quadratic
    faint = (kept > 0) & (kept < PRUNED) & (at.tied[:k] == 0)
    away, back = faint & (quadratic < 0.9 * kept), faint & (quadratic > 1.01 * kept)
    leap = step[0].clone()
    leap[:k] = torch.where(away, 1e3, torch.where(back, (kept / RETURNED).log(), leap[:k]))
    return leap, step[1] + 0.5 * RETURNED * float((quadratic / kept - 1)[back].sum())


def proposals(at: Slope, update: Update) -> list[tuple[Tensor, float]]:
    """Steps to try, best first: each lowers F if it is short enough."""
    if update == "newton":
        first = newton(at)
        far = (first[0].abs() > LONGEST) & ((first[0] * at.gradient).abs() > 0.1 * first[1])
        clipped = (first[0].clamp(-LONGEST, LONGEST), first[1])
        in_turn = [bounded(at), clipped] if bool(far.any()) else [clipped, bounded(at)]
        return [_leaping(at, in_turn[0]), *in_turn]
    step, fall = mackay(at)
    return [(step, fall)] if update == "mackay" else [(0.5 * step, 0.5 * fall)]


def bounds(prior: Prior, traces: Tensor) -> tuple[Tensor, Tensor]:
    """Limits of the log precisions `[K]`, relative to the curvature: beyond them nothing changes any more.

    At the upper one a group keeps at most 1e-9 effective dimensions; at the lower one the prior is 1e-12 of the mean
    curvature. Without any curvature F does not depend on a precision, and it stays where it is.
    """
    total = prior.sum(traces / prior.groups.spread(prior.scale))
    size, seen = prior.sum(torch.ones_like(traces)), total > 0
    low, high = (total / size).log() + math.log(1e-12), total.log() + math.log(1e9)
    return torch.where(seen, low, prior.log_precision), torch.where(seen, high, prior.log_precision)
