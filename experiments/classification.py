"""Scores of class probabilities, the temperature of a plain classifier, and the separation of unfamiliar inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from experiments.scores import paired

BINS = 15


def scores(
    known: Tensor, y: Tensor, unfamiliar: Tensor, references: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Of probabilities `[n, C]` with labels `[n]`, beside those of unfamiliar inputs `[m, C]`.

    `references` are log probabilities `[n]` of the labels under what the paired differences of the NLL are to.
    """
    loss, (confidence, guess) = -log_prob(known, y), known.max(1)
    right = (guess == y).double()
    return {
        "n": len(y),
        "nll": float(loss.mean()),
        "nll_sd": float(loss.std()),
        "accuracy": float(right.mean()),
        "ece": calibration_error(confidence, right),
        "brier": float((known - one_hot(y, known.shape[1])).square().sum(1).mean()),
        "confidence": float(confidence.mean()),
        "auroc_entropy": auroc(entropy(known), entropy(unfamiliar)),
        "against": {name: paired(loss + other) for name, other in (references or {}).items()},
    }


def log_prob(probabilities: Tensor, y: Tensor) -> Tensor:
    """Log probability of each label `[n]`."""
    return probabilities.gather(1, y.unsqueeze(1)).squeeze(1).log()


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """|confidence − accuracy| averaged over equal-width bins of the confidence."""
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, confidence.double() - right)
    return float(gaps.abs().sum() / len(right))


def entropy(probabilities: Tensor) -> Tensor:
    """Of each row `[n]`."""
    return torch.special.entr(probabilities).sum(1)


def auroc(familiar: Tensor, unfamiliar: Tensor) -> float:
    """The probability that an unfamiliar input scores higher than a familiar one, ties half."""
    ordered = familiar.double().sort().values
    below = torch.searchsorted(ordered, unfamiliar.double())
    up_to = torch.searchsorted(ordered, unfamiliar.double(), right=True)
    return float((below + up_to).double().mean() / 2 / len(ordered))


def temperature(logits: Tensor, y: Tensor) -> float:
    """The divisor of the logits that is best for these labels, between 1/20 and 20."""

    def loss(log_temperature: float) -> float:
        return float(cross_entropy(logits.double() / torch.tensor(log_temperature).exp(), y))

    return float(torch.tensor(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x).exp())
