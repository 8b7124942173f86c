"""What is refused at the door: each check names the rule, what came, and what to do."""

from typing import Any

import torch
from torch import Tensor

from linlap.data import Batch
from linlap.errors import (
    BatchDependentError,
    DataError,
    InputError,
    NetworkError,
    NotFiniteError,
    RandomNetworkError,
)
from linlap.features import Linearised
from linlap.tree import leaves

PROBED_ROWS = 8


def choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """`value` must be one of the allowed ones."""
    if value not in allowed:
        raise InputError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, but it is {value!r}: choose one of these"
        )


def finite_inputs(inputs: Any, number: int) -> None:
    """Refuse NaN and infinity among the inputs of one batch."""
    bad = sum(int((~torch.isfinite(leaf)).sum()) for leaf in leaves(inputs) if leaf.is_floating_point())
    if bad:
        raise DataError(
            f"inputs must be finite, but batch {number} holds {bad} NaN or infinite numbers: clean or impute them"
        )


def finite_outputs(outputs: Tensor, number: int) -> Tensor:
    """Refuse NaN and infinity among the outputs of one batch."""
    if not bool(torch.isfinite(outputs).all()):
        bad = int((~torch.isfinite(outputs)).any(dim=1).sum())
        raise NotFiniteError(
            f"the network's outputs must be finite, but {bad} of the {len(outputs)} rows of batch {number} are NaN or "
            "infinite: check the trained weights and the scale of these inputs"
        )
    return outputs


def network_on(linearised: Linearised, batch: Batch) -> torch.Size:
    """Probe the network on a few rows and return the shape of one example's output."""
    few = batch.rows(0, PROBED_ROWS)
    finite_inputs(few.inputs, 0)
    outputs = linearised.shaped_outputs(few.inputs)
    if len(outputs) != len(few):
        raise NetworkError(
            f"the network must return one row for each example, but {len(few)} examples gave an output of shape "
            f"{list(outputs.shape)}: put the batch on the first axis"
        )
    finite_outputs(outputs.flatten(1), 0)
    _deterministic(outputs, linearised.shaped_outputs(few.inputs))
    alone = torch.cat([linearised.shaped_outputs(few.rows(i, i + 1).inputs) for i in range(min(len(few), 2))])
    _by_itself(outputs[:2], alone)
    return outputs.shape[1:]


def _deterministic(first: Tensor, second: Tensor) -> None:
    if _differ(first, second):
        raise RandomNetworkError(
            "the network must return the same outputs for the same inputs in eval mode, but two evaluations differ by "
            f"{float((first - second).abs().max()):.3g}: switch off what is random (functional dropout, sampling)"
        )


def _by_itself(together: Tensor, alone: Tensor) -> None:
    if _differ(together, alone):
        raise BatchDependentError(
            "the output for one example must not depend on the other rows of the batch, but rows evaluated alone and "
            f"together differ by {float((together - alone).abs().max()):.3g}: give batch normalisation running "
            "statistics (track_running_stats=True), or normalise within each example"
        )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Beyond the rounding of kernels that depend on the batch size?"""
    if one.shape != other.shape:
        return True
    tolerance = 1e-3 * torch.finfo(one.dtype).eps ** 0.25
    return bool((one - other).abs().max() > tolerance * (one.abs().max() + 1e-30)) if one.numel() else False
