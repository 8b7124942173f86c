"""Detection: which groups of weights are normalised, which only rescale one another, which do nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from linlap.network import Network
from linlap.symmetry.certificate import normalised, rescaling
from linlap.symmetry.found import NormalisedGroup, Rescaling, Symmetries
from linlap.symmetry.idealised import Statistics
from linlap.symmetry.nullspace import INTEGRAL, common_scales, null_space, sparse_vectors
from linlap.symmetry.probe import Probe, probing

MANY = 400  # tensors, above which groups are looked for inside modules only
FIRST, SPARE = 40, 8  # equations for tensors by themselves and inside modules; more than there are unknowns

BLURRED = 1e-2  # the change of the outputs without epsilons, above which they are more than a blur

LARGEST_EXPONENT = 8  # what needs more is an accident of rounding


class HoldsNetwork(Protocol):
    """What detection needs of a linearised network."""

    @property
    def network(self) -> Network:
        """The network as a pure function of named weights."""
        ...


def detect(linearised: HoldsNetwork, inputs: Any) -> Symmetries:
    """Find the scale symmetries of a trained network by probing it on a few inputs.

    Works in float64 on copies of the weights and buffers, without epsilons and with batch statistics in the
    place of running ones; what is found there is confirmed on running statistics that scale along. The cost
    is that of about one gradient on these rows for each tensor, and a few evaluations for each group found.

    Args:
        linearised: the network, as `linearise` returns it. Weights without a posterior stay fixed.
        inputs: calibration inputs as the network takes them; at most 32 rows are used.
    """
    with probing(linearised.network, inputs) as probe:
        active = probe.with_effect("batch")
        in_use = probe.with_effect("running") if probe.running else active
        search = Search(probe, active, inert=[name for name in in_use if name not in active])
        search.tensors()
        search.modules()
        if len(active) <= MANY:
            search.anywhere()
        rescalings = search.rescalings() if len(active) <= MANY else []
    order = list(linearised.network.weights)
    found = sorted(search.found, key=lambda group: order.index(group.names[0]))
    idle = tuple(name for name in order if name not in in_use)
    return Symmetries(tuple(found), tuple(rescalings), idle, tuple(_notes(len(active), probe.blur)))


def _notes(tensors: int, blur: float) -> Iterator[str]:
    if tensors > MANY:
        yield f"{tensors} tensors are too many to look for groups across modules"
    if blur > BLURRED:
        yield f"the invariance is approximate: epsilons make {blur:.1%} of the variation of the outputs"


@dataclass
class Equations:
    """Responses `[E, G]` at random points, extended as they are asked for."""

    probe: Probe
    names: list[str]
    statistics: Statistics
    rows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    seed: int = 0

    def of(self, names: Sequence[str], count: int) -> tuple[np.ndarray, np.ndarray]:
        """`count` responses and their natural sizes `[E, len(names)]`."""
        while len(self.rows) < count and self.seed < 2 * count:
            self.seed += 1
            row = self.probe.equation(self.names, self.statistics, self.seed)
            if np.isfinite(row).all():  # a point where the network overflows tells nothing
                self.rows.append(row)
        columns = [self.names.index(name) for name in names]
        stacked = np.array(self.rows).reshape(len(self.rows), 2, len(self.names))[..., columns]
        return stacked[:, 0], stacked[:, 1]


class Search:
    """Groups found so far, the most local first; every weight is in one group at most."""

    def __init__(self, probe: Probe, active: list[str], inert: list[str]) -> None:
        self.probe, self.active, self.inert = probe, active, inert
        self.equations = Equations(probe, active, "batch")
        self.tolerance = probe.tolerance.response
        self.found: list[NormalisedGroup] = []

    @property
    def rest(self) -> list[str]:
        """The active weights that are in no group."""
        taken = {name for group in self.found for name in group.names}
        return [name for name in self.active if name not in taken]

    def tensors(self) -> None:
        """Tensors normalised by themselves: v_g = J(P_g θ) = 0 at every point."""
        responses, natural = self.equations.of(self.active, min(FIRST, len(self.active)) + SPARE)
        silent = np.abs(responses).max(axis=0, initial=0) <= self.tolerance * natural.max(axis=0, initial=0)
        alone = [[self.active[g]] for g in np.flatnonzero(silent)]
        for names in alone:  # a bias goes to the weight beside it, before any other can claim it
            self._accept(names, self._beside(names))
        for names in alone:
            self._accept(names, self.inert)

    def modules(self) -> None:
        """Joint groups among the tensors of one module."""
        together: dict[str, list[str]] = {}
        for name in self.rest:
            module = f"{name.rpartition('.')[0]}.".partition("parametrizations.")[0]
            together.setdefault(module, []).append(name)
        for names in together.values():
            if 1 < len(names) <= FIRST:
                self._joint(names)

    def anywhere(self) -> None:
        """Joint groups across modules, such as everything that writes to a residual stream."""
        while self._joint(self.rest):
            pass

    def _joint(self, names: list[str]) -> bool:
        """Accept disjoint joint groups among these names; were there any?"""
        if len(names) < 2:
            return False
        basis = self._null_space(names)
        supports = common_scales(basis)
        number = len(self.found)
        for group in ([names[i] for i in support] for support in supports):
            if not self._accept(group, self._beside(group)):
                self._accept(group, self.inert)
        return len(self.found) > number

    def _null_space(self, names: list[str]) -> np.ndarray:
        return null_space(*self.equations.of(names, len(names) + SPARE), self.tolerance)

    def _beside(self, names: list[str]) -> list[str]:
        """The inert weights in the modules of these names."""
        owners = {name.rpartition(".")[0] for name in names}
        return [name for name in self.inert if name.rpartition(".")[0] in owners]

    def _accept(self, names: list[str], inert: list[str]) -> bool:
        taken = {name for group in self.found for name in group.names}
        if taken & set(names):
            return False
        group = normalised(self.probe, names, inert)
        if group is None or taken & set(group.names):
            return False
        self.found.append(group)
        return True

    # --- what is left of the null space

    def rescalings(self) -> list[Rescaling]:
        """Sparse symmetries beyond the normalised groups."""
        members = [[name for name in group.names if name in self.active] for group in self.found]
        alone = [active[0] for active in members if len(active) == 1]
        names = [*self.active, *self.inert]
        basis = self._embedded(names, [n for n in self.active if n not in alone], alone)
        if basis.shape[1] <= len(self.found):  # the groups are all there is
            return []
        groups = [[float(name in group.names) for name in names] for group in self.found]
        known = np.array(groups).reshape(-1, len(names)).T
        found = []
        if self.probe.running:
            inert = np.eye(len(names))[:, len(self.active) :]
            found = self._sparse(names, self._as_used(names, np.hstack([basis, inert])), known)
            known = np.column_stack([known, *(symmetry for _, symmetry in found)])
            # what the inert ones do follows from the statistics that scale along
            known[len(self.active) :] = 0
        found += self._sparse(names, basis, known)
        return [rescaling for rescaling, _ in found]

    def _sparse(self, names: list[str], basis: np.ndarray, known: np.ndarray) -> list[tuple[Rescaling, np.ndarray]]:
        """Certified sparse vectors of this space beyond the known ones."""
        vectors = [v for v in sparse_vectors(basis, known) if np.abs(v).max() <= LARGEST_EXPONENT]
        tried = [(rescaling(self.probe, _exponents(names, v), self.inert), v) for v in vectors]
        return [(symmetry, vector) for symmetry, vector in tried if symmetry is not None]

    def _embedded(self, names: list[str], joint: list[str], alone: list[str]) -> np.ndarray:
        """The null space `[G, d]` on all names: that of the joint ones, a unit vector for each one alone."""
        identity = np.eye(len(names))
        parts = [identity[:, [names.index(name) for name in alone]]]
        if joint:
            parts.append(identity[:, [names.index(name) for name in joint]] @ self._null_space(joint))
        return np.hstack(parts)

    def _as_used(self, names: list[str], basis: np.ndarray) -> np.ndarray:
        """The part of these symmetries that running statistics leave in place."""
        used = Equations(self.probe, names, "running")
        responses, natural = used.of(names, basis.shape[1] + SPARE)
        return basis @ null_space(responses @ basis, natural @ np.abs(basis), self.tolerance)


def _exponents(names: Sequence[str], vector: np.ndarray) -> dict[str, float]:
    """Name → exponent, small fractions made exact, the first one positive."""
    nonzero = [(name, float(a)) for name, a in zip(names, vector, strict=True) if abs(a) > INTEGRAL]
    sign = 1.0 if nonzero[0][1] > 0 else -1.0
    simple = [(name, a, float(Fraction(a).limit_denominator(4))) for name, a in nonzero]
    return {name: sign * (near if abs(a - near) < INTEGRAL else a) for name, a, near in simple}
