"""Which weights share a precision: a partition of the P weights into named groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor

from linlap.errors import InputError
from linlap.network import Layout


@dataclass(frozen=True)
class Groups:
    """G named groups; `membership` `[P]` holds each weight's group."""

    names: tuple[str, ...]
    membership: Tensor
    parameters: dict[str, list[str]]

    def __len__(self) -> int:
        return len(self.names)

    def to(self, device: torch.device) -> "Groups":
        """The same groups for weights on another device."""
        return replace(self, membership=self.membership.to(device))

    @cached_property
    def sizes(self) -> Tensor:
        """d_g `[G]`."""
        return self.sum(torch.ones(len(self.membership), dtype=torch.float64, device=self.membership.device))

    def sum(self, per_weight: Tensor) -> Tensor:
        """Sums over the groups `[..., G]` of numbers per weight `[..., P]`."""
        zeros = per_weight.new_zeros(*per_weight.shape[:-1], len(self))
        return zeros.index_add(-1, self.membership, per_weight)

    def spread(self, per_group: Tensor) -> Tensor:
        """Each weight's number `[..., P]` from its group's `[..., G]`."""
        return per_group[..., self.membership]


def from_names(layout: Layout, grouped: Mapping[str, Sequence[str]]) -> Groups:
    """Groups of whole parameters."""
    number = {name: g for g, names in enumerate(grouped.values()) for name in names}
    membership = torch.cat([torch.full((shape.numel(),), number[n]) for n, shape in layout.shapes.items()])
    return Groups(tuple(grouped), membership, {g: list(names) for g, names in grouped.items()})


def single(layout: Layout) -> Groups:
    """All weights together."""
    return from_names(layout, {"all": list(layout.shapes)})


def by_tensor(layout: Layout) -> Groups:
    """Each parameter by itself."""
    return from_names(layout, {name: [name] for name in layout.shapes})


def by_layer(layout: Layout, normalised: Sequence[Sequence[str]] = ()) -> Groups:
    """The weights of one module together, cut where a normalised group is only a part of them.

    A group that mixes normalised with other weights would tie the arbitrary scale of the first to the second, so
    that no precision of its own could undo it.
    """
    together = {name: frozenset(joint) for joint in normalised for name in joint}
    grouped: dict[tuple[str, frozenset[str]], list[str]] = {}
    for name in layout.shapes:
        module = name.rpartition(".")[0].partition(".parametrizations.")[0].removeprefix("parametrizations.")
        grouped.setdefault((module, together.get(name, frozenset())), []).append(name)
    modules = [module for module, _ in grouped]
    titles = [
        (module or "network") if modules.count(module) == 1 else _common(names)
        for (module, _), names in grouped.items()
    ]
    return from_names(layout, dict(zip(titles, grouped.values(), strict=True)))


def _common(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1].rpartition('.')[2]}"


def by_normalised(layout: Layout, normalised: Sequence[Sequence[str]]) -> Groups:
    """One group for each normalised group, one for the rest."""
    grouped = {_common(names): list(names) for names in normalised}
    taken = {name for names in normalised for name in names}
    rest = [name for name in layout.shapes if name not in taken]
    return from_names(layout, grouped | ({"rest": rest} if rest else {}))


def by_channel(layout: Layout, normalised: Sequence[Sequence[str]]) -> Groups:
    """Each output channel of a normalised group by itself, every other parameter whole."""
    channels = {name: joint for joint in normalised for name in joint if len(layout.shapes[name])}
    names: list[str] = []
    parameters: dict[str, list[str]] = {}
    parts: list[Tensor] = []

    def number(title: str, name: str) -> int:
        if title not in parameters:
            names.append(title)
            parameters[title] = []
        parameters[title].append(name)
        return names.index(title)

    for name, shape in layout.shapes.items():
        if name not in channels:
            parts.append(torch.full((shape.numel(),), number(name, name)))
            continue
        first = channels[name][0]
        each = torch.tensor([number(f"{first}[{i}]", name) for i in range(shape[0])])
        parts.append(each.repeat_interleave(shape.numel() // shape[0]))
    return Groups(tuple(names), torch.cat(parts), parameters)


def by_mapping(layout: Layout, mapping: Mapping[str, str | Sequence[str]]) -> Groups:
    """Groups given by parameter-name patterns; each weight goes to the first group that matches."""
    for group, patterns in mapping.items():
        several = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(several, Sequence) or not all(isinstance(pattern, str) for pattern in several):
            raise InputError(
                f"the patterns of a group must be a text or a list of texts, but those of {group!r} are {patterns!r}: write them "
                'like {"head": "head.*", "rest": "*"}'
            )
    grouped: dict[str, list[str]] = {group: [] for group in mapping}
    for name in layout.shapes:
        home = next((g for g, patterns in mapping.items() if _matches(name, patterns)), None)
        if home is None:
            raise InputError(
                f'every weight must belong to a group, but "{name}" matches no pattern of prior={dict(mapping)!r}: '
                'add a last group such as "rest": "*"'
            )
        grouped[home].append(name)
    if empty := [g for g, names in grouped.items() if not names]:
        raise InputError(
            f"every group must hold a weight, but no weight is left for the patterns of {empty}: mend them, since each of "
            f"{list(layout.shapes)} goes to the first group that matches"
        )
    return from_names(layout, grouped)


def _matches(name: str, patterns: str | Sequence[str]) -> bool:
    return any(fnmatchcase(name, p) for p in ([patterns] if isinstance(patterns, str) else patterns))
