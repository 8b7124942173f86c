"""Scales of the variance and of the noise, learnt on data the network has never seen."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from linlap.data import Batch, collect
from linlap.errors import DataWarning
from linlap.likelihood import Gaussian
from linlap.posterior import Calibration, Mean, Posterior
from linlap.predictive import Moments, Predictive

FEWEST = 30
"""Held-out examples below which the scales are called rough."""

MEANS: tuple[Mean, ...] = ("network", "linear")


def calibrate(post: Posterior, data: object) -> Posterior:
    """Learn one scale (classes, counts) or two (variance and noise) for each mean, by held-out log probability."""
    held = collect(data, post.network.device)
    weight = torch.cat([weights_of(batch) for batch in held]).cpu()
    plain = post.calibrated(Calibration(), post.reference)
    variance, noise = {}, {}
    for mean in MEANS:
        predicted = [plain.predict(batch.inputs, mean=mean) for batch in held]
        if isinstance(post.likelihood, Gaussian):
            variance[mean], noise[mean] = whitened(post, predicted, held).two_scales(weight)
        else:
            variance[mean], noise[mean] = _one_scale(predicted, held, weight), 1.0
    scores = torch.cat([plain.predict(batch.inputs).epistemic_score for batch in held])
    learnt = post.calibrated(Calibration(variance, noise), scores.double().sort().values)
    return replace(learnt, notes=(*post.notes, *_too_few(len(weight))))


def weights_of(batch: Batch) -> Tensor:
    """Example weights `[n]`, ones if none came."""
    ones = torch.ones(len(batch), dtype=torch.float64, device=batch.targets.device)
    return ones if batch.weights is None else batch.weights.to(ones)


def _too_few(examples: int) -> list[str]:
    """A warning where the scales would be little more than chance."""
    if examples >= FEWEST:
        return []
    message = (
        f"held_out should hold at least {FEWEST} examples, for scales learnt on fewer are rough, but it holds {examples}: pass "
        "more, or trust the evidence's own scales"
    )
    warnings.warn(message, DataWarning, stacklevel=4)
    return [message]


@dataclass(frozen=True)
class Whitened:
    """Residuals in units of the noise, on the axes of the epistemic covariance: both `[n, C]`.

    With noise variances D, D⁻½ cov D⁻½ = Q diag(ratios) Qᵀ and squares = (Qᵀ D⁻½ r)²: every quantity of
    V = a cov + b D is then a sum over C terms, rᵀV⁻¹r = Σ squares/(a ratios + b).
    """

    squares: Tensor
    ratios: Tensor

    def scale(self, share: float, weight: Tensor) -> float:
        """The best common scale s of V = 2(ρ cov + (1−ρ) D): the mean of rᵀV⁻¹r/C."""
        return float(
            (weight.unsqueeze(1) * self.squares / self._total(share)).sum() / weight.sum() / self.squares.shape[1]
        )

    def two_scales(self, weight: Tensor) -> tuple[float, float]:
        """Of cov and D: the common scale in closed form for each share ρ, ρ by a grid and golden section on its logit."""

        def loss(logit: float) -> float:
            share = _sigmoid(logit)
            logs = (self.scale(share, weight) * self._total(share)).log()
            return float((weight.unsqueeze(1) * logs).sum() / weight.sum())

        share = _sigmoid(_minimum(loss, -8.0, 8.0))
        scale = self.scale(share, weight)
        return 2 * scale * share, 2 * scale * (1 - share)

    def _total(self, share: float) -> Tensor:
        return 2 * (share * self.ratios + (1 - share))


def whitened(post: Posterior, predicted: list[Predictive], held: list[Batch]) -> Whitened:
    """The held-out residuals of a regression, all outputs of one example jointly."""
    squares, ratios = [], []
    for part, batch in zip(predicted, held, strict=True):
        values = post.likelihood.targets(batch.targets, None, post.output_shape).values
        std = cast(Tensor, part.noise_std).flatten().double()  # a regression has a noise
        residual = (values - part.mean.flatten(1).double()) / std
        eigenvalues, axes = torch.linalg.eigh(part.cov.double() / std / std.unsqueeze(1))
        squares.append((residual.unsqueeze(1) @ axes).squeeze(1) ** 2)
        ratios.append(eigenvalues.clamp(min=0))  # rounding of a positive semi-definite matrix
    return Whitened(torch.cat(squares).cpu(), torch.cat(ratios).cpu())


def _one_scale(predicted: list[Predictive], held: list[Batch], weight: Tensor) -> float:
    """Of the variance, by the predictive log probability, on the log scale."""

    def loss(log_scale: float) -> float:
        scaled = [_scaled(part, math.exp(log_scale)) for part in predicted]
        log_probs = torch.cat([p.log_prob(b.targets) for p, b in zip(scaled, held, strict=True)])
        return -float(weight @ log_probs.double().cpu())

    return math.exp(_minimum(loss, -14.0, 14.0))


def _scaled(part: Predictive, scale: float) -> Predictive:
    """The same prediction with another scale of the variance, which is all that these log probabilities use."""
    moments = Moments(lambda: scale * part.variance, lambda: scale * part.cov, lambda: scale * part.joint_cov)
    return Predictive(part.mean, part.noise_std, part.likelihood, moments, part.reference)


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """A grid, then golden section around its best point."""
    grid = torch.linspace(low, high, 57, dtype=torch.float64).tolist()
    values = [function(point) for point in grid]
    best = values.index(min(values))
    a, b = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = b - ratio * (b - a), a + ratio * (b - a)
        if function(left) <= function(right):
            b = right
        else:
            a = left
    return (a + b) / 2
