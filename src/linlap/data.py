"""The user's batches, in any of the forms people have, as a list of examples to sweep over."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linlap.errors import DataError
from linlap.tree import count, leaves, map_leaves, rebuild

PAIR_BATCH = 512
"""Rows of a sweep where the data came as one pair of tensors; also the size small batches are merged to."""


@dataclass(frozen=True)
class Batch:
    """`inputs` as the network takes them, `targets` `[n, ...]`, `weights` `[n]` of the examples or None."""

    inputs: Any
    targets: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, start: int, stop: int) -> "Batch":
        """The examples `start` to `stop`."""
        return Batch(
            map_leaves(lambda t: t[start:stop], self.inputs),
            self.targets[start:stop],
            None if self.weights is None else self.weights[start:stop],
        )


def batches(data: Any) -> Iterator[Batch]:
    """One pass over the user's data."""
    if is_pair(data):
        inputs, targets = map_leaves(torch.as_tensor, _tensors(data[0])), torch.as_tensor(data[1])
        if count(inputs) != len(targets):
            raise DataError(
                f"inputs and targets must have as many rows, but there are {count(inputs)} inputs and "
                f"{len(targets)} targets: pass pairs that belong together"
            )
        whole = Batch(inputs, targets)
        yield from (whole.rows(i, i + PAIR_BATCH) for i in range(0, len(targets), PAIR_BATCH))
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
    if isinstance(raw, Mapping) and "labels" in raw:
        inputs: Any = {key: value for key, value in raw.items() if key != "labels"}
        targets, weights = raw["labels"], None
    elif isinstance(raw, tuple | list) and len(raw) in (2, 3):
        inputs, targets, *rest = raw
        weights = rest[0] if rest else None
    else:
        kind = (
            f"a dict with the keys {sorted(map(str, raw))}" if isinstance(raw, Mapping) else f"a {type(raw).__name__}"
        )
        if isinstance(raw, tuple | list):
            kind += f" of {len(raw)} items"
        raise DataError(
            f"a batch must be (x, y), (x, y, weights) or a dict with 'labels', but batch {number} is {kind}: "
            "wrap the loader so that it yields one of these"
        )
    inputs, targets = _tensors(inputs), torch.as_tensor(targets)
    if not leaves(inputs) or count(inputs) != len(targets):
        rows = count(inputs) if leaves(inputs) else 0
        raise DataError(
            f"inputs and targets of a batch must have as many rows, but batch {number} has {rows} inputs and "
            f"{len(targets)} targets: pass pairs that belong together"
        )
    return Batch(inputs, targets, None if weights is None else torch.as_tensor(weights))


def _tensors(tree: Any) -> Any:
    """NumPy arrays become tensors; everything else stays as it is."""
    if isinstance(tree, np.ndarray):
        return torch.as_tensor(tree)
    if isinstance(tree, Mapping):
        return {key: _tensors(value) for key, value in tree.items()}
    return tuple(_tensors(value) for value in tree) if isinstance(tree, tuple | list) else tree


def collect(data: Any, device: torch.device) -> list[Batch]:
    """All examples on `device`, neighbouring batches of one shape merged so that sweeps are long."""
    check_iterable(data)
    collected: list[Batch] = []
    for batch in batches(data):
        if len(batch) == 0:
            continue
        moved = Batch(
            map_leaves(lambda t: t.detach().to(device), batch.inputs),
            batch.targets.detach().to(device),
            None if batch.weights is None else batch.weights.detach().to(device),
        )
        if collected and len(collected[-1]) < PAIR_BATCH and _alike(collected[-1], moved):
            moved = _merged(collected.pop(), moved)
        collected.append(moved)
    if not collected:
        raise DataError(
            "the data must hold at least one example, but not one came: check the loader, its sampler and filters"
        )
    return collected


def _alike(one: Batch, other: Batch) -> bool:
    return (one.weights is None) == (other.weights is None) and _form(one) == _form(other)


def _form(batch: Batch) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape[1:], leaf.dtype) for leaf in [*leaves(batch.inputs), batch.targets]]


def _merged(one: Batch, other: Batch) -> Batch:
    together = [torch.cat(pair) for pair in zip(leaves(one.inputs), leaves(other.inputs), strict=True)]
    weights = None if one.weights is None or other.weights is None else torch.cat([one.weights, other.weights])
    return Batch(rebuild(one.inputs, together), torch.cat([one.targets, other.targets]), weights)


@dataclass(frozen=True)
class Census:
    """What one pass over the data held, whatever its order: the number of examples and a checksum of them."""

    examples: int
    checksum: int


def census(data: Iterable[Batch]) -> Census:
    """Count the examples and add up a hash of each, so that the order does not matter."""
    examples, total = 0, 0
    for batch in data:
        rows = [_bytes(leaf) for leaf in [*leaves(batch.inputs), batch.targets]]
        for row in zip(*rows, strict=True):
            total += zlib.crc32(b"".join(row)) * 0x9E3779B97F4A7C15 + 1
        examples += len(batch)
    return Census(examples, total % 2**64)


def _bytes(tensor: Tensor) -> list[bytes]:
    rows = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()] if rows.numel() else [b""] * len(tensor)
