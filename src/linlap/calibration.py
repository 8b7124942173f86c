"""Scales of the variance and of the noise, learnt on data the network has never seen."""

import math
from typing import Any

import torch
from torch import Tensor

from linlap.data import batches, check_iterable
from linlap.likelihood import Gaussian, Targets
from linlap.posterior import Calibration, Posterior

MEANS = ("network", "linear")


def calibrate(post: Posterior, data: Any) -> Posterior:
    """Learn one scale (classes, counts) or two (variance and noise) for each mean, by held-out log probability."""
    check_iterable(data)
    variance, noise, scores = {}, {}, torch.zeros(0)
    for mean in MEANS:
        means, variances, targets = _held_out(post, data, mean)
        scores = variances.sum(1).sort().values
        if isinstance(post.likelihood, Gaussian):
            std = post.noise_std(mean)
            variance[mean], noise[mean] = _two_scales(means, variances, targets, std.flatten().double() ** 2)
        else:
            variance[mean], noise[mean] = _one_scale(post, means, variances, targets), 1.0
    return post.calibrated(Calibration(variance, noise), scores * variance["network"] / variance["linear"])


def _held_out(post: Posterior, data: Any, mean: str) -> tuple[Tensor, Tensor, Targets]:
    """Means, variances `[n, C]` and targets of the held-out data."""
    means, variances, values, weights = [], [], [], []
    for batch in batches(data):
        predicted = post.predict(batch.inputs, mean=mean)
        targets = post.likelihood.targets(batch.targets, batch.weights, post.output_shape)
        means.append(predicted.mean.flatten(1).double())
        variances.append(predicted.variance.flatten(1).double())
        values.append(targets.values)
        weights.append(targets.weight)
    return torch.cat(means), torch.cat(variances), Targets(torch.cat(values), torch.cat(weights))


def _two_scales(means: Tensor, variances: Tensor, targets: Targets, noise: Tensor) -> tuple[float, float]:
    """v → sρ'v, σ² → s(1−ρ')σ²: s in closed form for each ρ, ρ by a grid and golden section on its logit."""
    squares = (targets.values - means) ** 2

    def loss(logit: float) -> tuple[float, float]:
        share = 1 / (1 + math.exp(-logit))
        total = 2 * (share * variances + (1 - share) * noise)
        scale = float((squares / total).mean())
        return float((scale * total).log().mean()), scale

    logit = _minimum(lambda t: loss(t)[0], -8.0, 8.0)
    share, scale = 1 / (1 + math.exp(-logit)), loss(logit)[1]
    return 2 * scale * share, 2 * scale * (1 - share)


def _one_scale(post: Posterior, means: Tensor, variances: Tensor, targets: Targets) -> float:
    """Of the variance, on the log scale."""

    def loss(log_scale: float) -> float:
        shrunk = means / (1 + math.pi / 8 * math.exp(log_scale) * variances).sqrt()
        return float(post.likelihood.loss(shrunk, targets).sum())

    return math.exp(_minimum(loss, -14.0, 14.0))


def _minimum(function: Any, low: float, high: float) -> float:
    """A grid, then golden section around its best point."""
    grid = torch.linspace(low, high, 57).tolist()
    best = min(range(len(grid)), key=lambda i: function(grid[i]))
    a, b = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = b - ratio * (b - a), a + ratio * (b - a)
        if function(left) <= function(right):
            b = right
        else:
            a = left
    return (a + b) / 2
