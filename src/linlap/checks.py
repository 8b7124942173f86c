"""What is refused at the door: each check names the rule, what came, and what to do."""

from typing import Any

import torch
from torch import Tensor

from linlap.data import Batch, finite
from linlap.errors import (
    BatchDependentError,
    DataError,
    InputError,
    NetworkError,
    NotFiniteError,
    RandomNetworkError,
    ShapeError,
    TargetError,
)
from linlap.features import Linearised
from linlap.targets import Targets
from linlap.tree import count

PROBED_ROWS = 8

REMEDY = "give batch normalisation running statistics (track_running_stats=True), or normalise within each example"


def choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """`value` must be one of the allowed ones."""
    if value not in allowed:
        raise InputError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, but it is {value!r}: choose one of these"
        )


def positive_count(name: str, value: Any) -> None:
    """`value` must be a whole number of at least one."""
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, but it is {value!r}: ask for some")


def some(parts: list[Any]) -> None:
    """At least one input must have come."""
    if sum(count(part) for part in parts) == 0:
        raise DataError("predict needs at least one input, but not one came: pass rows of what the network takes")


def finite_inputs(inputs: Any, number: int) -> None:
    """Refuse NaN and infinity among the inputs of one batch."""
    finite(inputs, number)


def finite_outputs(outputs: Tensor, origin: int | Tensor | None = None) -> Tensor:
    """Refuse NaN and infinity among outputs `[n, C]`; `origin` is the user's batch of each row `[n]`, or of all."""
    bad = (~torch.isfinite(outputs)).any(dim=1)
    if bool(bad.any()):
        of = torch.as_tensor(0 if origin is None else origin, device=bad.device).expand(len(outputs))
        first = of[bad][0]
        raise NotFiniteError(
            f"the network's outputs must be finite, but {int(bad[of == first].sum())} of the {int((of == first).sum())} rows of "
            f"batch {int(first)} are NaN or infinite: check the trained weights and the scale of these inputs"
        )
    return outputs


def finite_derivatives(rows: Tensor, origin: int | Tensor | None = None) -> Tensor:
    """Refuse NaN and infinity among what is made of derivatives `[n, ...]`; `origin` as for `finite_outputs`."""
    if bool(torch.isfinite(rows.sum())):
        return rows
    bad = (~torch.isfinite(rows)).flatten(1).any(dim=1)
    if not bool(bad.any()):
        return rows
    of = torch.as_tensor(0 if origin is None else origin, device=bad.device).expand(len(rows))
    raise NotFiniteError(
        f"the network's derivatives must be finite, but those of {int(bad.sum())} examples of batch {int(of[bad][0])} are NaN or "
        "infinite although its outputs are not: look for a root, a norm or a logarithm at zero in forward, and add a small "
        "constant there"
    )


def outputs_on(linearised: Linearised, batch: Batch, shape: torch.Size) -> Tensor:
    """f `[n, C]` of a batch: finite, and of the shape `[...]` that the first batch's outputs have."""
    outputs = linearised.shaped_outputs(batch.inputs)
    if outputs.shape[1:] != shape:
        number = 0 if batch.origin is None else int(batch.origin[0])
        raise ShapeError(
            f"all outputs must have one shape, {list(shape)} in the first batch, but those of batch {number} have "
            f"{list(outputs.shape[1:])}: pad or crop the examples to one size"
        )
    return finite_outputs(outputs.flatten(1), batch.origin)


def targets_count(targets: Targets) -> Targets:
    """At least one target must have a weight."""
    if not bool((targets.weight > 0).any()):
        raise TargetError(
            f"at least one target must count, but all {len(targets.weight)} examples have weight 0 or no label but ignore_index: "
            "check both"
        )
    return targets


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
    finite_outputs(outputs.flatten(1), few.origin)
    linearised.vjp(few.inputs)  # it refuses outputs that are not differentiable
    _deterministic(outputs, linearised.shaped_outputs(few.inputs))
    _by_itself(linearised, few, outputs)
    return outputs.shape[1:]


def _deterministic(first: Tensor, second: Tensor) -> None:
    if _differ(first, second):
        raise RandomNetworkError(
            "the network must return the same outputs for the same inputs in eval mode, but two evaluations differ by "
            f"{float((first - second).abs().max()):.3g}: switch off what is random (functional dropout, sampling)"
        )


def _by_itself(linearised: Linearised, few: Batch, together: Tensor) -> None:
    """The first two rows, each alone, must give what they give together."""
    for i in range(min(len(few), 2)):
        try:
            alone = linearised.shaped_outputs(few.rows(i, i + 1).inputs)
        except (RuntimeError, ValueError) as refused:
            raise BatchDependentError(
                f"the output for one example must not depend on the other rows of the batch, but one row alone is refused "
                f"({refused}): {REMEDY}"
            ) from refused
        if alone.shape != together[i : i + 1].shape:
            raise NetworkError(
                f"one example must give one row of the same shape alone as in a batch, but it gave {list(alone.shape)} "
                f"instead of {[1, *together.shape[1:]]}: name the axis where forward squeezes, as in squeeze(-1)"
            )
        if _differ(together[i : i + 1], alone):
            raise BatchDependentError(
                "the output for one example must not depend on the other rows of the batch, but rows evaluated alone and "
                f"together differ by {float((together[i : i + 1] - alone).abs().max()):.3g}: {REMEDY}"
            )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Beyond the rounding of kernels that depend on the batch size?"""
    tolerance = 1e-3 * torch.finfo(one.dtype).eps ** 0.25
    return bool((one - other).abs().max() > tolerance * (one.abs().max() + 1e-30)) if one.numel() else False
