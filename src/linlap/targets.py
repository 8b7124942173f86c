"""Targets as likelihoods take them, and what all likelihoods refuse of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linlap.errors import ShapeError, TargetError


@dataclass(frozen=True)
class Targets:
    """`values` in the likelihood's own form and the `weight` of each term of the loss, both with n rows."""

    values: Tensor
    weight: Tensor

    def rows(self, rows: slice) -> "Targets":
        """The targets of some examples."""
        return Targets(self.values[rows], self.weight[rows])


def weights_of(weights: Tensor | None, n: int, like: Tensor) -> Tensor:
    """Example weights `[n]`, ones if none are given."""
    if weights is None:
        return torch.ones(n, dtype=torch.float64, device=like.device)
    weights = weights.to(like.device, torch.float64)
    wrong = int((~torch.isfinite(weights) | (weights < 0)).sum())
    if weights.shape != (n,) or wrong:
        raise TargetError(
            f"example weights must be one finite number ≥ 0 for each of the {n} examples, but they have shape "
            f"{list(weights.shape)} and {wrong} of them are negative, NaN or infinite: mend them, or leave them out (a batch of "
            "three is read as inputs, targets and weights)"
        )
    return weights


def aligned(raw: Tensor, output_shape: torch.Size, kind: str) -> Tensor:
    """Targets of the outputs' own shape, flat; `[n]` is accepted for an output `[n, 1]`, nothing else broadcasts."""
    if raw.is_complex():
        raise TargetError(
            f"{kind} targets must be real numbers, but they are {raw.dtype}: give the network two outputs for each complex one"
        )
    if raw.shape[1:] == output_shape or (raw.ndim == 1 and tuple(output_shape) == (1,)):
        return raw.reshape(len(raw), -1).to(torch.float64)
    raise ShapeError(
        f"{kind} targets must have the outputs' shape [n, {', '.join(map(str, output_shape))}], but they have shape "
        f"{list(raw.shape)}: reshape the targets, nothing is broadcast"
    )


def finite(values: Tensor) -> Tensor:
    """Refuse NaN and infinity among targets."""
    if bad := int((~torch.isfinite(values)).sum()):
        raise TargetError(
            f"targets must be finite, but {bad} of {values.numel()} are NaN or infinite: remove these examples"
        )
    return values
