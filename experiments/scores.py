"""Scores of probabilistic forecasts of one number: normal distributions and equal mixtures of them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEVEL = 0.9


class Forecast(ABC):
    """A distribution for each of n targets `[n, 1]`."""

    @property
    @abstractmethod
    def centre(self) -> Tensor:
        """Means `[n, 1]`."""

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Log density `[n]`."""

    @abstractmethod
    def below(self, y: Tensor) -> Tensor:
        """Probability of a smaller value `[n]`."""


@dataclass(frozen=True)
class Normal(Forecast):
    """Mean and standard deviation, noise included `[n, 1]`."""

    mean: Tensor
    std: Tensor

    @property
    def centre(self) -> Tensor:
        """The mean."""
        return self.mean

    def log_prob(self, y: Tensor) -> Tensor:
        """Log N(y; mean, std²)."""
        return torch.distributions.Normal(self.mean, self.std).log_prob(y).squeeze(1)

    def below(self, y: Tensor) -> Tensor:
        """Φ((y − mean)/std)."""
        return torch.distributions.Normal(self.mean, self.std).cdf(y).squeeze(1)


@dataclass(frozen=True)
class Mixture(Forecast):
    """An equal mixture."""

    parts: Sequence[Forecast]

    @property
    def centre(self) -> Tensor:
        """The mean of the means."""
        return torch.stack([part.centre for part in self.parts]).mean(0)

    def log_prob(self, y: Tensor) -> Tensor:
        """Of the mean density."""
        return torch.stack([part.log_prob(y) for part in self.parts]).logsumexp(0) - math.log(len(self.parts))

    def below(self, y: Tensor) -> Tensor:
        """The mean of the probabilities."""
        return torch.stack([part.below(y) for part in self.parts]).mean(0)


def scores(forecast: Forecast, y: Tensor, references: Mapping[str, Tensor]) -> dict[str, Any]:
    """Mean test NLL and its standard deviation over the points, the same of the paired differences, targets in 90 % intervals."""
    loss, tail = -forecast.log_prob(y), (1 - LEVEL) / 2
    below = forecast.below(y)
    return {
        "n": len(loss),
        "nll": float(loss.mean()),
        "nll_sd": float(loss.std()),
        "rmse": float((forecast.centre - y).square().mean().sqrt()),
        "inside": int(((below > tail) & (below < 1 - tail)).sum()),
        "against": {name: paired(loss + other) for name, other in references.items()},
    }


def paired(difference: Tensor) -> dict[str, float]:
    """Mean and standard deviation over the points."""
    return {"mean": float(difference.mean()), "sd": float(difference.std())}
