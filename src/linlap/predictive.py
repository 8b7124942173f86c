"""What is predicted: a mean, its covariance, the noise, and what people make of them. A value type."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from linlap.errors import InputError, ShapeError
from linlap.likelihood import Bernoulli, Categorical, Gaussian, Likelihood, Poisson

NODES = 32
"""Gauss–Hermite nodes of a one-dimensional expectation."""


@dataclass(frozen=True)
class Moments:
    """The epistemic second moments, each computed when asked for; shapes as in `Predictive`."""

    variance: Callable[[], Tensor]
    covariance: Callable[[], Tensor]
    joint: Callable[[], Tensor]


@dataclass(frozen=True)
class Predictive:
    """The predictive distribution for n inputs with outputs of any shape `[...]`, C numbers in all.

    Attributes:
        mean: `[n, ...]`, the network's own outputs or the linear model's: logits for classes, log rates for counts.
        noise_std: the noise standard deviation that belongs to this mean, `[...]`, or None.
    """

    mean: Tensor
    noise_std: Tensor | None
    likelihood: Likelihood = field(repr=False)
    moments: Moments = field(repr=False)
    reference: Tensor = field(repr=False)
    seed: int = field(default=0, repr=False)

    def __len__(self) -> int:
        return len(self.mean)

    @cached_property
    def cov(self) -> Tensor:
        """Epistemic covariance of each example's outputs `[n, C, C]`."""
        return self.moments.covariance()

    @cached_property
    def joint_cov(self) -> Tensor:
        """Epistemic covariance between all examples `[n, C, n, C]`."""
        return self.moments.joint()

    @cached_property
    def variance(self) -> Tensor:
        """Epistemic variance `[n, ...]`."""
        known = self.__dict__.get("cov")
        flat = self.moments.variance() if known is None else known.diagonal(dim1=1, dim2=2)
        return flat.reshape(self.mean.shape)

    @property
    def epistemic_std(self) -> Tensor:
        """Standard deviation of the outputs, noise left out `[n, ...]`."""
        return self.variance.sqrt()

    @property
    def std(self) -> Tensor:
        """Standard deviation `[n, ...]`: of the targets, noise included, for regression; of the outputs otherwise."""
        return self.epistemic_std if self.noise_std is None else (self.variance + self.noise_std**2).sqrt()

    @property
    def epistemic_score(self) -> Tensor:
        """One number an example `[n]`, the total epistemic variance: what to rank unfamiliar inputs by."""
        return self.variance.flatten(1).sum(1)

    @property
    def epistemic_rank(self) -> Tensor:
        """The share of reference examples (held out, else training) with a lower score `[n]`."""
        below = torch.searchsorted(self.reference, self.epistemic_score.to(self.reference))
        return below.double() / max(1, len(self.reference))

    def unfamiliar(self, false_alarms: float = 0.05) -> Tensor:
        """Is the score above all but that share of the reference examples' `[n]`?"""
        if not 0 <= false_alarms < 1:
            raise InputError(
                f"false_alarms must lie between 0 and 1, but it is {false_alarms}: 0.05 lets one of twenty familiar inputs alarm"
            )
        cut = torch.quantile(self.reference, 1 - false_alarms)
        return self.epistemic_score.to(self.reference) > cut

    def probs(self, method: Literal["probit", "mc"] = "probit", samples: int = 1000) -> Tensor:
        """Class probabilities `[n, ...]`, the uncertainty of the logits averaged over.

        `"probit"` is the mean-field formula softmax(f / √(1 + π v/8)), `"mc"` an average over sampled logits.
        """
        if not isinstance(self.likelihood, Categorical | Bernoulli):
            raise InputError(
                f"probs needs class labels, but this posterior's likelihood is {self.likelihood.name}: "
                "use mean, std, interval or log_prob"
            )
        if method == "probit":
            return self._link(self.mean / (1 + math.pi / 8 * self.variance).sqrt())
        if method == "mc":
            return self._link(self.sample(samples)).mean(0)
        raise InputError(f'method must be "probit" or "mc", but it is {method!r}: choose one of these')

    def _link(self, logits: Tensor) -> Tensor:
        if isinstance(self.likelihood, Categorical):
            axis = logits.ndim - self.mean.ndim + (self.likelihood.class_axis or 1)
            return logits.softmax(axis)
        return logits.sigmoid()

    def sample(self, draws: int, seed: int | None = None) -> Tensor:
        """Draws of the outputs `[draws, n, ...]` with this mean and `cov`; noise left out."""
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        values, vectors = torch.linalg.eigh(self.cov)
        roots = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        noise = torch.randn(draws, *roots.shape[:2], 1, dtype=roots.dtype, generator=generator).to(roots.device)
        return self.mean + (roots @ noise).reshape(draws, *self.mean.shape).to(self.mean.dtype)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Bounds (low, high) `[n, ...]` between which a target lies with that probability."""
        if not 0 < level < 1:
            raise InputError(f"level must lie between 0 and 1, but it is {level}: 0.9 gives 90 % intervals")
        if not isinstance(self.likelihood, Gaussian):
            raise InputError(
                f"interval needs a regression, but this posterior's likelihood is {self.likelihood.name}: use probs"
            )
        half = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64))) * self.std
        return self.mean - half, self.mean + half

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability (density) of each example's target `[n]`.

        Regression takes all outputs of an example jointly; classes (by the probit formula) and counts take each place's
        own distribution, and add up.
        """
        raw = torch.as_tensor(targets)
        if raw.shape[:1] != self.mean.shape[:1]:
            raise ShapeError(
                f"log_prob needs a target for each of the {len(self)} predicted examples, but the targets have shape "
                f"{list(raw.shape)}: pass those of the same examples"
            )
        y = self.likelihood.targets(raw, None, self.mean.shape[1:])
        if isinstance(self.likelihood, Gaussian):
            return self._gaussian_log_prob(y.values)
        if isinstance(self.likelihood, Poisson):
            return self._poisson_log_prob(y.values)
        shrunk = (self.mean / (1 + math.pi / 8 * self.variance).sqrt()).flatten(1).double()
        return -self.likelihood.loss(shrunk, y)

    def _gaussian_log_prob(self, values: Tensor) -> Tensor:
        residual = values - self.mean.flatten(1).double()
        noise = torch.zeros(()) if self.noise_std is None else self.noise_std.flatten().double() ** 2
        if residual.shape[1] == 1:
            variance = self.variance.flatten(1).double() + noise
            return (-0.5 * (residual**2 / variance + (2 * math.pi * variance).log())).sum(1)
        total = self.cov.double() + torch.diag_embed(noise.expand(residual.shape[1]))
        lower = torch.linalg.cholesky(total)
        white = torch.linalg.solve_triangular(lower, residual.unsqueeze(-1), upper=False).squeeze(-1)
        half_logdet = lower.diagonal(dim1=1, dim2=2).log().sum(1)
        return -0.5 * (white**2).sum(1) - half_logdet - 0.5 * residual.shape[1] * math.log(2 * math.pi)

    def _poisson_log_prob(self, values: Tensor) -> Tensor:
        """Each output's own mixture over its log rate."""
        mean, variance = self.mean.flatten(1).double(), self.variance.flatten(1).double()
        return poisson_mixture(values, mean, variance).sum(1)


def poisson_mixture(counts: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log ∫ Poisson(y | e^o) N(o | mean, variance) do, elementwise.

    Gauss–Hermite quadrature about the integrand's own mode, with its own curvature there: nodes about the mean would
    miss a count that was not expected. With o = mean + v (y − r) at the mode, u = log(v r) solves
    e^u + u = log v + mean + v y, where Newton's method falls monotonically from the right.
    """
    v = variance.clamp(min=1e-30)
    level = v.log() + mean + v * counts
    u = torch.where(level > 1, level.clamp(min=1).log(), level)
    for _ in range(8):
        u = u - (u.exp() + u - level) / (u.exp() + 1)
    rate = u.exp() / v
    nodes, weights = _hermite()
    width = (rate + 1 / v).rsqrt()
    shift = (v * (counts - rate)).unsqueeze(-1) + width.unsqueeze(-1) * nodes.to(v)
    o = mean.unsqueeze(-1) + shift
    terms = counts.unsqueeze(-1) * o - o.exp() - shift**2 / (2 * v.unsqueeze(-1)) + (nodes**2 / 2 + weights.log()).to(v)
    return torch.logsumexp(terms, -1) + width.log() - 0.5 * v.log() - torch.lgamma(counts + 1)


def _hermite() -> tuple[Tensor, Tensor]:
    """Nodes and weights for the expectation under a standard normal, by Golub and Welsch."""
    off = torch.arange(1, NODES, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, vectors[0] ** 2
