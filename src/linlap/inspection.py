"""What `fit` would do with a network, before anything runs: its weights, groups and symmetries, and what each curvature takes."""

import time
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from linlap import checks, planning, symmetry
from linlap import prior as priors
from linlap.curvature import rotated
from linlap.curvature.kron import Kron
from linlap.data import Batch
from linlap.errors import DataError, InputError
from linlap.features import Linearised, linearise
from linlap.network import Chosen, Layout
from linlap.posterior import inputs_of
from linlap.prior import Structure as PriorStructure
from linlap.state import random_state_kept
from linlap.symmetry import NormalisedGroup, Symmetries
from linlap.tree import count, map_leaves
from linlap.uses.coverage import Coverage, understood

PROBED_ROWS = 32
"""Rows on which the scale symmetries are looked for."""

MEASURED_SIZE = 384
"""Side of the matrices whose product is timed."""


@dataclass(frozen=True)
class WeightLine:
    """One named weight: its shape, and the group with which it shares a precision."""

    name: str
    shape: tuple[int, ...]
    group: str
    certificate: str
    """How the invariance to its scale was certified, or empty."""
    block: str
    """What covers it where the curvature is `"kron"`."""


@dataclass(frozen=True)
class CurvatureLine:
    """What one structure of the curvature would take."""

    name: str
    operations: float
    seconds: float
    bytes: float
    fits: bool


@dataclass(frozen=True)
class Inspection:
    """What `fit` would work on; `print` shows it.

    Attributes:
        weights: those that get a posterior.
        frozen: how many numbers do not.
        groups: group → parameter names, for the prior asked for.
        symmetries: normalised groups with their certificates, rescalings, weights without effect.
        mixed: normalised groups whose scale this prior ties to other weights.
        curvatures: cost of each structure; the seconds are those of its arithmetic, passes of the network come on top.
        chosen: the structure that `curvature="auto"` would take, None if none fits the memory.
        examples, outputs, memory: N, C and the bytes that may be used.
    """

    weights: tuple[WeightLine, ...]
    frozen: int
    groups: dict[str, list[str]]
    symmetries: Symmetries
    mixed: tuple[str, ...]
    curvatures: tuple[CurvatureLine, ...]
    chosen: str | None
    examples: int
    outputs: int
    memory: int

    @property
    def size(self) -> int:
        """P."""
        return sum(torch.Size(line.shape).numel() for line in self.weights)

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self._weights(), "", *self._scales(), "", *self._costs()])

    def _head(self) -> list[str]:
        beside = f", {self.frozen:,} other numbers stay fixed" if self.frozen else ""
        return [
            f"{self.size:,} weights in {len(self.groups)} groups{beside}; {self.examples:,} examples of {self.outputs:,} outputs"
        ]

    def _weights(self) -> list[str]:
        rows = [("weight", "shape", "group", "block", "scale")]
        rows += [
            (w.name, " × ".join(map(str, w.shape)) or "scalar", w.group, w.block, w.certificate) for w in self.weights
        ]
        return _table(rows)

    def _scales(self) -> list[str]:
        warned = [f"warning: this prior ties the arbitrary scale of {names} to other weights" for names in self.mixed]
        return ["scale symmetries", *(f"  {line}" for line in self.symmetries.lines()), *warned]

    def _costs(self) -> list[str]:
        rows = [("curvature", "FLOP", "time", "memory", "")]
        for line in self.curvatures:
            remark = "chosen" if line.name == self.chosen else "" if line.fits else "does not fit"
            rows.append((line.name, f"{line.operations:.1e}", _duration(line.seconds), _size(line.bytes), remark))
        lines = [*_table(rows), f"({_size(self.memory)} of memory may be used)"]
        return lines if self.chosen else [*lines, 'nothing fits: pass memory= if there is more, or params="last_layer"']


def inspect(
    net: nn.Module | Linearised,
    x: Any,
    *,
    n_data: int | None = None,
    prior: PriorStructure = "auto",
    params: Chosen = None,
    memory: str | int | None = None,
) -> Inspection:
    """Show what `fit` would work on and take, for any likelihood; the network is only read, on a few rows.

    Args:
        net: the trained network, or what `ll.linearise` returns.
        x: some inputs as the network takes them, or a loader, whose first batch is used.
        n_data: how many examples `fit` would get; if None, those in `x`, of which a loader may know the number.
        prior: which weights share a precision, as in `fit`.
        params: which weights get a posterior, as in `fit`.
        memory: how much may be used, such as `"4GiB"`; half of what is free if None.

    Example:
        >>> import linlap as ll, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
        >>> ll.inspect(net, torch.randn(8, 3), n_data=100).chosen
        'dense'
    """
    budget = planning.memory_in_bytes(memory)
    linearised = linearise(net, params)
    with random_state_kept():
        few, rows = _few(x, linearised.network.device)
        shape = checks.network_on(linearised, Batch(few, torch.empty(count(few))))
        found = symmetry.detect(linearised, few)
        coverage = understood(linearised, map_leaves(lambda t: t[: rotated.PROBED_ROWS], few))
    layout = linearised.network.layout
    normalised = found.groups_for(prior)
    groups = priors.grouped(prior, layout, normalised).parameters
    sizes = planning.Sizes(
        rows if n_data is None else n_data, shape.numel(), layout.size, priors.count(prior, layout, normalised)
    )
    return Inspection(
        weights=tuple(_weights(layout, groups, found.normalised, coverage)),
        frozen=sum(tensor.numel() for tensor in linearised.network.frozen.values()),
        groups=groups,
        symmetries=found,
        mixed=tuple(priors.mixes(prior, layout, normalised)),
        curvatures=tuple(_curvatures(sizes, budget)),
        chosen=_chosen(sizes, budget),
        examples=sizes.examples,
        outputs=sizes.outputs,
        memory=budget,
    )


def _few(x: Any, device: torch.device) -> tuple[Any, int]:
    """Some rows of the inputs, and how many came with them."""
    first = next(iter(islice(inputs_of(x), 1)), None)
    if first is None or count(first) == 0:
        raise DataError("inspect needs at least one input, but not one came: pass a few rows of what the network takes")
    return map_leaves(lambda t: t[:PROBED_ROWS].detach().to(device), first), _examples(x, count(first))


def _examples(x: Any, first: int) -> int:
    """How many a loader says it holds, or a list; else those of its first batch."""
    if isinstance(x, list):
        return sum(count(inputs) for inputs in inputs_of(x))
    held = getattr(x, "dataset", None)
    return len(held) if isinstance(held, Sized) else first


def _weights(
    layout: Layout, groups: dict[str, list[str]], normalised: Sequence[NormalisedGroup], coverage: Coverage
) -> list[WeightLine]:
    home: dict[str, str] = {}
    for group, names in groups.items():
        for name in names:
            home.setdefault(name, group if group.partition("[")[0] == group else f"{group.partition('[')[0]}[…]")
    certified = {name: f"normalised, {group.certificate}" for group in normalised for name in group.names}
    kinds = {block.name: block.kind for block in rotated.planned(layout, coverage, Kron().plan)}
    return [
        WeightLine(name, tuple(shape), home[name], certified.get(name, ""), kinds[name])
        for name, shape in layout.shapes.items()
    ]


def _curvatures(sizes: planning.Sizes, budget: int) -> list[CurvatureLine]:
    rate = product_rate()
    costs = {name: sizes.cost(structure) for name, structure in planning.STRUCTURES.items()}
    return [
        CurvatureLine(name, cost.operations, cost.operations / rate, cost.bytes, cost.bytes <= budget)
        for name, cost in costs.items()
    ]


def _chosen(sizes: planning.Sizes, budget: int) -> str | None:
    try:
        return planning.choose("auto", sizes, budget).name
    except InputError:
        return None


def product_rate() -> float:
    """FLOP a second of a float64 matrix product on this machine, the best of three of some milliseconds."""
    one = torch.ones(MEASURED_SIZE, MEASURED_SIZE, dtype=torch.float64)
    return 2 * MEASURED_SIZE**3 / min(_timed(one) for _ in range(3))


def _timed(matrix: Tensor) -> float:
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    return max(time.perf_counter() - start, 1e-9)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{1e3 * seconds:.2g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _size(size: float) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if size >= 2**power:
            return f"{size / 2**power:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"
