"""The finite check of a candidate symmetry, and the statistics and epsilons that scale along with it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from linlap.network import Weights
from linlap.symmetry.found import Certificate, NormalisedGroup, Power, Rescaling, factor
from linlap.symmetry.idealised import Statistics
from linlap.symmetry.probe import Probe, Seen, epsilons

SCALES = (0.25, 4.0, 16.0)  # powers of two: scaling by them is free of rounding
K = 4.0

Exponents = Mapping[str, float]


def normalised(probe: Probe, names: Sequence[str], inert: Sequence[str]) -> NormalisedGroup | None:
    """The group with its certificate, or None if f is not invariant to its scale."""
    along = _scaled_along(probe, dict.fromkeys(names, 1), inert)
    if along is None:
        return None
    members = tuple(name for name in probe.network.weights if name in along.exponents)
    absorbing = _absorbing(probe, members, along)
    channelwise = _channelwise(probe, members, along.allowed)
    return NormalisedGroup(members, along.certificate, along.buffers, absorbing, channelwise, along.residual)


def rescaling(probe: Probe, exponents: Exponents, inert: Sequence[str]) -> Rescaling | None:
    """The symmetry θ_g → k^{a_g} θ_g with its certificate: by itself, or with statistics that scale along."""
    residual = _residual(probe, exponents, "running", _allowed(probe, exponents))
    if residual is not None:
        return Rescaling(exponents, "exact", {}, residual)
    for sign in (1, -1):
        along = _scaled_along(probe, {name: sign * a for name, a in exponents.items()}, inert)
        if along is not None:
            return Rescaling(along.exponents, along.certificate, along.buffers, along.residual)
    return None


def _allowed(probe: Probe, names: Iterable[str]) -> float:
    """The change that counts as none: relative to f, and to what a disturbance of these tensors does to it.

    What hardly has an effect would pass any test of its scale.
    """
    effect = probe.change(probe.disturbed([*names]), "batch")
    return probe.tolerance.change * min(1.0, effect) if effect > probe.tolerance.effect else -1.0


def _residual(probe: Probe, powers: Mapping[str, Power], statistics: Statistics, allowed: float) -> float | None:
    """The largest relative change of f over the scales, or None if f does change."""
    residual = 0.0
    for k in SCALES:
        residual = max(residual, probe.change(_scaled(probe, powers, k), statistics))
        if residual > allowed:
            return None
    return residual


def _scaled(probe: Probe, powers: Mapping[str, Power], k: float) -> Weights:
    return {name: probe.tensors[name] * factor(k, power, probe.tensors[name]) for name, power in powers.items()}


# --- running statistics


@dataclass(frozen=True)
class Along:
    """A certified symmetry: exponents of weights, powers of statistics, what the layers saw at K."""

    exponents: dict[str, float]
    buffers: dict[str, Power]
    residual: float
    allowed: float
    seen: dict[str, list[Seen]]

    @property
    def certificate(self) -> Certificate:
        """Is it one of the weights alone?"""
        return "with co-scaled statistics" if self.buffers else "exact"


def _scaled_along(probe: Probe, exponents: Exponents, inert: Sequence[str]) -> Along | None:
    """Certify on batch statistics, then on running ones that scale along; None if either fails.

    On batch statistics a weight in front of batch norm is invariant by itself. A running mean scales with k
    only together with the biases that shift it, and their Jacobian scales as the weight's does even where
    they are zero: `inert` ones, without effect on batch statistics, join; frozen ones go with the statistics.
    """
    allowed = _allowed(probe, exponents)
    residual = _residual(probe, exponents, "batch", allowed)
    if residual is None:
        return None
    seen = probe.seen(_scaled(probe, exponents, K))
    if not probe.running:
        return Along(dict(exponents), {}, residual, allowed, seen)
    powers = _powers(probe, seen)
    if powers is None:
        return None
    joined, frozen = _biases(probe, exponents, powers, inert)
    buffers = _buffers(powers) | dict.fromkeys(frozen, 1)
    weights = {**exponents, **dict.fromkeys(joined, 1)}
    used = _residual(probe, weights | buffers, "running", allowed)
    if used is None:
        return None
    if joined or frozen:
        seen = probe.seen(_scaled(probe, weights | dict.fromkeys(frozen, 1), K))
    if not _means_follow(probe, seen, powers):
        return None
    return Along(weights, buffers, max(residual, used), allowed, seen)


def _powers(probe: Probe, seen: Mapping[str, list[Seen]]) -> dict[str, Power] | None:
    """Layer → power of K by which its inputs scale, where they do; None if some change in another way."""
    found: dict[str, Power] = {}
    for layer in probe.running:
        calls = zip(probe.usual.get(layer, []), seen.get(layer, []), strict=True)
        powers = {_power(before, after, probe.tolerance.change) for before, after in calls} or {0}
        if None in powers or len(powers) > 1:
            return None
        power = powers.pop()
        if power:
            found[layer] = power
    return found


def _power(before: Seen, after: Seen, tolerance: float) -> Power | None:
    """The power of K in a layer's inputs, from their variances; one for each channel where these differ."""
    kept = _equal(after.variance, before.variance, tolerance)
    scaled = _equal(after.variance, K**2 * before.variance, tolerance)
    constant = before.variance.sqrt() <= 100 * torch.finfo(before.mean.dtype).eps * before.mean.abs()
    if not bool((constant | kept | scaled).all()):
        return None
    telling = (~constant).nonzero().flatten()
    if bool(kept[telling].all()):
        return 0
    if bool(scaled[telling].all()):
        return 1
    channels = torch.arange(len(kept), device=kept.device)
    nearest = (channels[:, None] - telling).abs().argmin(1)  # for channels that are constant on these rows
    return tuple(int(p) for p in scaled[telling[nearest]])


def _biases(
    probe: Probe, exponents: Exponents, powers: Mapping[str, Power], inert: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Inert weights, and frozen parameters beside the scaled ones, that shift a channel that scales."""
    channels = {(layer, c) for layer, power in powers.items() for c in _channels(probe, layer, power)}
    owners = {name.rpartition(".")[0] for name in exponents}
    beside = [n for n in probe.network.frozen if n in probe.parameters and n.rpartition(".")[0] in owners]
    shifting = [name for name in (*inert, *beside) if channels and probe.shifts(name) & channels]
    joined = [name for name in shifting if name in probe.network.weights and name not in exponents]
    return joined, [name for name in shifting if name in probe.network.frozen]


def _channels(probe: Probe, layer: str, power: Power) -> list[int]:
    if isinstance(power, tuple):
        return [c for c, p in enumerate(power) if p]
    return list(range(len(probe.usual[layer][0].mean)))


def _buffers(powers: Mapping[str, Power]) -> dict[str, Power]:
    """Name → power: a mean scales as the layer's inputs do, a variance as their square."""
    found: dict[str, Power] = {}
    for layer, power in powers.items():
        prefix = f"{layer}." if layer else ""
        doubled = tuple(2 * p for p in power) if isinstance(power, tuple) else 2 * power
        found |= {f"{prefix}running_mean": power, f"{prefix}running_var": doubled}
    return found


def _means_follow(probe: Probe, seen: Mapping[str, list[Seen]], powers: Mapping[str, Power]) -> bool:
    """Do the batch means scale as the running ones will be made to?"""
    for layer in probe.running:
        for before, after in zip(probe.usual.get(layer, []), seen.get(layer, []), strict=True):
            expected = before.mean * factor(K, powers.get(layer, 0), before.mean)
            size = after.variance.sqrt() + expected.abs() + before.mean.abs()
            if bool(((after.mean - expected).abs() > probe.tolerance.change * size).any()):
                return False
    return True


def _equal(one: Tensor, other: Tensor, tolerance: float) -> Tensor:
    return (one - other).abs() <= tolerance * torch.maximum(one.abs(), other.abs())


# --- epsilons and channels


def _absorbing(probe: Probe, names: Sequence[str], along: Along) -> dict[str, int]:
    """Epsilons of modules that take something else at scale K, or hold the weights, and still give the same.

    Where only some channels scale, no one epsilon scales with them.
    """
    partly = {name.rpartition(".")[0] for name, power in along.buffers.items() if isinstance(power, tuple)}
    owners = {name.rpartition(".")[0] for name in names}
    paths: dict[str, int] = {}
    for name, calls in along.seen.items():
        pairs = list(zip(probe.usual[name], calls, strict=True))
        differ = partial(_differ, tolerance=probe.tolerance.change)
        fed = name in owners or any(differ(before.taken, after.taken) for before, after in pairs)
        same = not any(differ(before.given, after.given) for before, after in pairs)
        if fed and same and name not in partly:
            module = probe.network.module.get_submodule(name)
            paths |= {f"{name}.{attribute}".lstrip("."): 2 for attribute in epsilons(module)}
    return paths


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).norm() > tolerance * one.norm())


def _channelwise(probe: Probe, names: Sequence[str], allowed: float) -> bool:
    """Does f, on batch statistics, stay when each slice along the first axis has a scale of its own?"""
    lengths = {w.shape[0] if w.ndim else 1 for w in (probe.tensors[name] for name in names)}
    if len(lengths) > 1 or lengths == {1}:
        return False
    generator = torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.randint(-3, 4, (lengths.pop(),), generator=generator)
    changed = {}
    for name in names:
        w = probe.tensors[name]
        changed[name] = w * scales.to(w).reshape(-1, *[1] * (w.ndim - 1))
    return probe.change(changed, "batch") <= allowed
