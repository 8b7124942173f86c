"""The user's batches, in any of the forms people have, as a list of examples to sweep over."""

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linlap.errors import DataError
from linlap.tree import leaves, map_leaves, named_leaves

PAIR_BATCH = 512
"""Rows of a sweep where the data came as one pair of tensors; also the size small batches are merged to."""


@dataclass(frozen=True)
class Batch:
    """`inputs` as the network takes them, `targets` `[n, ...]`, `weights` `[n]` of the examples or None.

    `origin` `[n]` is the number of the batch in which the user's data held each example, None where there was none.
    """

    inputs: Any
    targets: Tensor
    weights: Tensor | None = None
    origin: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, start: int, stop: int) -> "Batch":
        """The examples `start` to `stop`."""
        return self.map(lambda t: t[start:stop])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with a function applied to every tensor of it, in the order inputs, targets, weights, origin."""
        inputs, targets = map_leaves(function, self.inputs), function(self.targets)
        weights = None if self.weights is None else function(self.weights)
        origin = None if self.origin is None else function(self.origin)
        return Batch(inputs, targets, weights, origin)


def batches(data: Any) -> Iterator[Batch]:
    """One pass over the user's data; a pair comes in batches of `PAIR_BATCH` rows."""
    if is_pair(data):
        whole = _batch(data[0], data[1], None, "the pair (X, Y)")
        yield from (whole.rows(i, i + PAIR_BATCH) for i in range(0, len(whole), PAIR_BATCH))
        return
    for number, raw in enumerate(data):
        yield as_batch(raw, number)


def is_pair(data: Any) -> bool:
    """Is it one `(X, Y)` rather than an iterable of batches? Only Y's type tells the two apart."""
    return isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor | np.ndarray)


def check_iterable(data: Any) -> None:
    """Refuse what can be passed over only once, or not at all."""
    if is_pair(data):
        return
    if not isinstance(data, Iterable):
        raise DataError(
            f"data must be an iterable of (x, y) batches or one (X, Y) pair of tensors, but it is a "
            f"{type(data).__name__}: pass a DataLoader, a list of batches, or (X, Y)"
        )
    if isinstance(data, Iterator):
        raise DataError(
            f"data is passed over more than once, but a {type(data).__name__} can be read only once: "
            "pass a list, a DataLoader or a pair of tensors"
        )


def as_batch(raw: Any, number: int) -> Batch:
    """One batch of a loader: `(x, y)`, `(x, y, weights)`, or a dict with `labels`."""
    name = f"batch {number}"
    if isinstance(raw, Mapping) and "labels" in raw:
        return _batch({key: value for key, value in raw.items() if key != "labels"}, raw["labels"], None, name)
    if isinstance(raw, tuple | list) and len(raw) in (2, 3):
        return _batch(raw[0], raw[1], raw[2] if len(raw) == 3 else None, name)
    came = f"a {type(raw).__name__}"
    if isinstance(raw, Mapping):
        came = f"a dict with the keys {sorted(map(str, raw))}"
    elif isinstance(raw, tuple | list):
        came += f" of {len(raw)} items"
    raise DataError(
        f"a batch must be (x, y), (x, y, weights) or a dict with 'labels', but {name} is {came}: "
        "wrap the loader so that it yields one of these"
    )


def _batch(inputs: Any, targets: Any, weights: Any, name: str) -> Batch:
    """A batch of tensors with one row an example, or a word about what came instead."""
    read, targets = tensors(inputs, name), _tensor(targets, "targets", name)
    read = tuple(read) if isinstance(read, list) else read  # positional arguments
    weights = None if weights is None else _tensor(weights, "weights", name)
    rows, held = targets.shape[:1], leaves(read)
    if not held:
        raise DataError(
            f"inputs must hold a tensor or an array, but those of {name} are a {type(inputs).__name__} without any: convert them"
        )
    if not rows or any(leaf.shape[:1] != rows for leaf in [*held, *([] if weights is None else [weights])]):
        shapes = ", ".join(str(list(leaf.shape)) for leaf in held)
        beside = "" if weights is None else f", and weights of shape {list(weights.shape)}"
        raise DataError(
            f"inputs and targets must have one row for each example, but {name} has inputs of shape {shapes} and targets of "
            f"shape {list(targets.shape)}{beside}: pass whole batches of pairs that belong together; what all examples share "
            "belongs into the network, as a buffer"
        )
    return Batch(read, targets, weights)


def _tensor(value: Any, kind: str, name: str) -> Tensor:
    """A tensor of what is one already, an array or a list of numbers; it may share their memory."""
    try:
        with warnings.catch_warnings():  # nothing is written to it
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            return torch.as_tensor(np.asarray(value, order="C") if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError) as unreadable:
        raise DataError(
            f"{kind} must be one tensor or array of numbers, but those of {name} are a {type(value).__name__} which cannot be "
            f"made one ({unreadable}): convert them first"
        ) from unreadable


def tensors(tree: Any, name: str) -> Any:
    """NumPy arrays become tensors; everything else stays as it is."""
    if isinstance(tree, np.ndarray):
        return _tensor(tree, "inputs", name)
    if isinstance(tree, Mapping):
        return {key: tensors(value, name) for key, value in tree.items()}
    if isinstance(tree, list):
        return [tensors(value, name) for value in tree]
    return tuple(tensors(value, name) for value in tree) if isinstance(tree, tuple) else tree


def finite(inputs: Any, number: int) -> None:
    """Refuse NaN and infinity among the inputs of one batch."""
    bad = sum(int((~torch.isfinite(leaf)).sum()) for leaf in leaves(inputs))
    if bad:
        raise DataError(
            f"inputs must be finite, but batch {number} holds {bad} NaN or infinite numbers: clean or impute them"
        )


def collect(data: Any, device: torch.device) -> list[Batch]:
    """All examples on `device`, neighbouring batches of one shape merged so that sweeps are long.

    Batches are copied, since a loader may fill one tensor again and again; a pair `(X, Y)` is not.
    """
    check_iterable(data)
    collected: list[Batch] = []
    for number, batch in enumerate(batches(data)):
        if len(batch) == 0:
            continue
        finite(batch.inputs, number)
        origin = torch.full((len(batch),), number)
        moved = replace(batch, origin=origin).map(lambda t: t.detach().to(device, copy=not is_pair(data)))
        if collected and len(collected[-1]) < PAIR_BATCH and _form(collected[-1]) == _form(moved):
            moved = _merged(collected.pop(), moved)
        collected.append(moved)
    if not collected:
        raise DataError(
            "the data must hold at least one example, but not one came: check the loader, its sampler and filters"
        )
    return collected


def _form(batch: Batch) -> tuple[Any, ...]:
    """Batches may be merged if they have the same: names, shapes and types of their tensors, and all else."""

    def kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        return tensor.shape[1:], tensor.dtype

    weighted = batch.weights is not None
    paths = [path for path, _ in named_leaves(batch.inputs)]
    return map_leaves(kind, batch.inputs), paths, kind(batch.targets), weighted


def _merged(one: Batch, other: Batch) -> Batch:
    following = iter(
        [*leaves(other.inputs), other.targets, *(t for t in (other.weights, other.origin) if t is not None)]
    )
    return one.map(lambda t: torch.cat([t, next(following)]))


def dropped(data: Any, examples: int) -> int:
    """How many examples a loader with `drop_last` leaves out of a pass that gave so many."""
    leaves_out = getattr(data, "drop_last", False) or getattr(getattr(data, "batch_sampler", None), "drop_last", False)
    sampler = getattr(data, "sampler", None)
    return max(0, len(sampler) - examples) if leaves_out and isinstance(sampler, Sized) else 0


@dataclass(frozen=True)
class Census:
    """What one pass over the data held, whatever its order: the number of examples and a checksum of them."""

    examples: int
    checksum: int


def census(data: Iterable[Batch]) -> Census:
    """Count the examples and add up a hash of each, so that the order does not matter."""
    examples, total = 0, 0
    for batch in data:
        weights = [] if batch.weights is None else [batch.weights]
        rows = [_bytes(leaf) for leaf in [*leaves(batch.inputs), batch.targets, *weights]]
        for row in zip(*rows, strict=True):
            total += zlib.crc32(b"".join(row)) * 0x9E3779B97F4A7C15 + 1
        examples += len(batch)
    return Census(examples, total % 2**64)


def _bytes(tensor: Tensor) -> list[bytes]:
    rows = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()] if rows.numel() else [b""] * len(tensor)
