"""Which structure of the curvature, and how much memory: from sizes alone, before anything runs."""

import os
import re
from dataclasses import dataclass

from linlap.curvature.base import Cost, Structure
from linlap.curvature.dense import Dense
from linlap.curvature.diagonal import Diagonal
from linlap.curvature.dual import Dual
from linlap.curvature.kron import Kron
from linlap.curvature.sampled import Sampled
from linlap.errors import InputError

STRUCTURES: dict[str, Structure] = {s.name: s for s in (Dense(), Dual(), Kron(), Diagonal(), Sampled(Kron()))}
PREFERENCE = (("dense", "dual"), ("kron",), ("diagonal",), ("sampled",))
"""Exact structures first, the cheapest of them; then those that approximate H, the best first; samples where asked for."""

AFFORDABLE = 3e14
"""Operations that an exact structure may take where it was not asked for, about an hour of two cores."""

UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Sizes:
    """N, C, P and the number of learnt precisions."""

    examples: int
    outputs: int
    weights: int
    precisions: int

    def cost(self, structure: Structure) -> Cost:
        """What the structure would take."""
        return structure.cost(self.examples, self.outputs, self.weights, self.precisions)


def memory_in_bytes(memory: str | int | None) -> int:
    """`"4GiB"` or a number of bytes; half of what is free if None."""
    if memory is None:
        return free_memory() // 2
    if isinstance(memory, int) and memory > 0:
        return memory
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMG]I?B)?\s*", str(memory).upper())
    if not found or float(found[1]) <= 0:
        raise InputError(
            f'memory must be a number of bytes or a text such as "4GiB", but it is {memory!r}: write it like one of these'
        )
    return int(float(found[1]) * UNITS[found[2] or ""])


def free_memory() -> int:
    """Bytes of main memory that are free now, 4 GiB where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pages = "SC_PHYS_PAGES"
        known = hasattr(os, "sysconf") and pages in os.sysconf_names
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") // 2 if known else 2**32


def choose(curvature: str | Structure, sizes: Sizes, memory: int) -> Structure:
    """The structure asked for, or the cheapest that fits."""
    if isinstance(curvature, Structure):
        return curvature
    if curvature not in ("auto", *STRUCTURES):
        raise InputError(
            f'curvature must be "auto", {", ".join(map(repr, STRUCTURES))} or an object implementing '
            f"linlap.curvature.base.Structure, but it is {curvature!r}: choose one of these"
        )
    costs = {name: sizes.cost(structure) for name, structure in STRUCTURES.items()}
    if curvature != "auto":
        costs = {curvature: costs[curvature]}
    fitting = {name: cost for name, cost in costs.items() if cost.bytes <= memory}
    for alike in PREFERENCE:
        found = [n for n in alike if n in fitting and (curvature == n or _affordable(n, fitting[n]))]
        if found:
            return STRUCTURES[min(found, key=lambda name: fitting[name].operations)]
    needs = ", ".join(f"{name} {cost.bytes / 2**30:.3g} GiB" for name, cost in costs.items())
    raise InputError(
        f"the curvature must fit {memory / 2**30:.3g} GiB of memory, but {sizes.weights:,} weights with "
        f"{sizes.examples:,} examples of {sizes.outputs:,} outputs need {needs}: pass memory= if there is more, fewer "
        'weights with params="last_layer", or fewer examples'
    )


def _affordable(name: str, cost: Cost) -> bool:
    """Exact structures may take too long even where they fit; the others are what there is then."""
    return name not in PREFERENCE[0] or cost.operations <= AFFORDABLE
