"""What detection finds, and a copy of the network in which a normalised group has another scale."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Certificate = Literal["exact", "with co-scaled statistics"]
Power = float | tuple[int, ...]
"""An exponent of k: one number, or one for each channel where only some channels scale."""


@dataclass(frozen=True)
class NormalisedGroup:
    """Weights θ'' with f(θ' + kθ'') = f(θ' + θ'') for all k > 0 (Definition 1).

    Attributes:
        names: the parameters, to be scaled together.
        certificate: "exact", or "with co-scaled statistics" where `buffers` must scale along, as they would
            in a training run at another scale.
        buffers: name → power of k: 1 for a running mean (and a frozen bias in front of it), 2 for a running
            variance; a power for each channel where only some scale.
        epsilons: path of a module's epsilon → power of k that removes the last difference between two scales.
        channelwise: may each slice along the first axis have a k of its own?
        residual: the largest change of the outputs, relative to their variation over the inputs, for k in
            {1/4, 4, 16}, without the epsilons.
    """

    names: tuple[str, ...]
    certificate: Certificate
    buffers: Mapping[str, Power]
    epsilons: Mapping[str, int]
    channelwise: bool
    residual: float

    def __str__(self) -> str:
        each = ", one scale for each channel" if self.channelwise else ""
        return f"{listed(self.names)}: normalised, {self.certificate}{each} (largest change {self.residual:.0e})"


@dataclass(frozen=True)
class Rescaling:
    """A symmetry θ_g → k^{a_g} θ_g with mixed signs: `exponents` holds the a_g that are not zero.

    Two layers around a ReLU have one. It is not Definition 1, yet one precision for both depends on k too.
    Now and then the sparsest form is a common scale, of weights that overlap with a normalised group.
    """

    exponents: Mapping[str, float]
    certificate: Certificate
    buffers: Mapping[str, Power]
    residual: float

    def __str__(self) -> str:
        sides: dict[float, list[str]] = {}
        for name, exponent in self.exponents.items():
            sides.setdefault(exponent, []).append(name)
        scaled = "; ".join(f"{listed(names)} by k^{a:g}" for a, names in sides.items())
        return f"{scaled}: rescaling, {self.certificate} (largest change {self.residual:.0e})"


@dataclass(frozen=True)
class Symmetries:
    """The scale symmetries of a trained network.

    Attributes:
        normalised: disjoint groups, in the order of the network.
        rescalings: independent symmetries beyond what the normalised groups already give.
        without_effect: weights with a zero Jacobian on these inputs: dead units, the key bias of attention.
        notes: what to know about the search.
    """

    normalised: tuple[NormalisedGroup, ...]
    rescalings: tuple[Rescaling, ...] = ()
    without_effect: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The parameter names of each normalised group."""
        return tuple(group.names for group in self.normalised)

    def groups_for(self, prior: object) -> list[tuple[str, ...]]:
        """The normalised groups that a prior is to keep apart: by channel only where slices of the first axis scale alone."""
        return [g.names for g in self.normalised if prior != "channel" or g.channelwise]

    def lines(self) -> list[str]:
        """One line for each finding."""
        findings = [str(finding) for finding in (*self.normalised, *self.rescalings)] or ["no scale symmetry"]
        if self.without_effect:
            findings.append(f"{listed(self.without_effect)}: without effect on these inputs")
        return [*findings, *self.notes]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def listed(names: Sequence[str]) -> str:
    """Up to four names, or the first and the last with their number."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, … {names[-1]} ({len(names)} tensors)"


def factor(k: float, power: Power, like: Tensor) -> float | Tensor:
    """k^power, a number or one for each channel."""
    if isinstance(power, tuple):
        return torch.tensor([k**p for p in power], dtype=like.dtype, device=like.device)
    return k**power


def rescaled(module: nn.Module, group: NormalisedGroup, k: float) -> nn.Module:
    """A copy of the network that computes the same with the group's weights scaled by k.

    Statistics and epsilons scale along. `dataclasses.replace(group, epsilons={})` leaves the epsilons alone,
    as a training run at another scale would.
    """
    twin = copy.deepcopy(module, _plain_tensors(module))
    tensors = dict(twin.named_parameters()) | dict(twin.named_buffers())
    with torch.no_grad():
        for name in group.names:
            tensors[name].mul_(k)
        for name, power in group.buffers.items():
            tensors[name].mul_(factor(k, power, tensors[name]))
    for path, power in group.epsilons.items():
        owner, _, attribute = path.rpartition(".")
        holder = twin.get_submodule(owner)
        setattr(holder, attribute, getattr(holder, attribute) * k**power)
    return twin


def _plain_tensors(module: nn.Module) -> dict[int, Any]:
    """Copies of tensors that `deepcopy` refuses: computed ones kept as attributes (old weight norm)."""
    kept = [value for m in module.modules() for value in vars(m).values() if isinstance(value, Tensor)]
    return {id(tensor): tensor.detach().clone() for tensor in kept if not tensor.is_leaf}
