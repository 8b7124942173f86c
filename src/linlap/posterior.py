"""The posterior: θ⋆, the factor of H + Λ, the evidence and how it was found; it predicts and samples."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from linlap import checks
from linlap.curvature.base import Factor
from linlap.data import as_batch, tensors
from linlap.errors import InputError
from linlap.evidence import Setting
from linlap.features import Linearised, Model
from linlap.likelihood import Gaussian, Likelihood
from linlap.network import Network
from linlap.predictive import Moments, Predictive
from linlap.state import random_state_kept
from linlap.tree import count, map_leaves

Mean = Literal["network", "linear"]


@dataclass(frozen=True)
class Status:
    """Did the search end at an optimum, and what to do if not."""

    converged: bool
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Noise:
    """Noise variances `[K]`: inside the evidence, about the network's own output, and of the plain network."""

    linear: Tensor
    network: Tensor
    plain: Tensor


@dataclass(frozen=True)
class Calibration:
    """Scales of the variance and of the noise variance for each mean, learnt on held-out data; ones without."""

    variance: dict[str, float] = field(default_factory=lambda: {"network": 1.0, "linear": 1.0})
    noise: dict[str, float] = field(default_factory=lambda: {"network": 1.0, "linear": 1.0})


@dataclass(frozen=True)
class Posterior:
    """A Gaussian posterior over the weights of a linearised network; made by `ll.fit`.

    Example:
        >>> import linlap as ll, torch
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> post = ll.fit(torch.nn.Linear(1, 1), (x, 2 * x), "regression", progress=False)
        >>> post.predict(x).std.shape
        torch.Size([20, 1])
    """

    linearised: Linearised = field(repr=False)
    likelihood: Likelihood
    model: Model
    evidence_at: str
    curvature: str
    setting: Setting = field(repr=False)
    factor: Factor = field(repr=False)
    optimum: Tensor = field(repr=False)
    output_shape: torch.Size
    examples: int
    log_evidence: float
    log_evidence_error: float
    history: list[float] = field(repr=False)
    status: Status
    noises: Noise | None = field(repr=False)
    reference: Tensor = field(repr=False)
    memory: int = field(repr=False)
    seed: int = 0
    calibration: Calibration = field(default_factory=Calibration, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def prior(self) -> dict[str, float]:
        """Effective precision of each group, every factor in."""
        return dict(zip(self.setting.prior.groups.names, self.setting.prior.by_group.tolist(), strict=True))

    @property
    def groups(self) -> dict[str, list[str]]:
        """The parameter names of each group."""
        return {g: list(names) for g, names in self.setting.prior.groups.parameters.items()}

    @cached_property
    def effective_dimensions(self) -> dict[str, float]:
        """How many directions of each group the data have determined, γ_g."""
        groups = self.setting.prior.groups
        return dict(zip(groups.names, groups.sum(self.factor.effective_dimensions()).tolist(), strict=True))

    @property
    def noise(self) -> float | Tensor | None:
        """The noise standard deviation inside `log_evidence`: a number, `[C]` with `per_output`, or None."""
        sigma = self.setting.noise
        return None if sigma is None else float(sigma) if sigma.numel() == 1 else sigma

    @property
    def weights(self) -> dict[str, Tensor]:
        """θ⋆ by name."""
        return self.linearised.network.layout.split(self.optimum)

    def sample(self, draws: int, seed: int | None = None) -> dict[str, Tensor]:
        """Draws of the weights, by name, `[draws, *shape]`."""
        checks.positive_count("draws", draws)
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        flat = self.optimum + self.factor.sample(draws, generator)
        return self.linearised.network.layout.split(flat)

    def predict(self, x: Any, mean: Mean = "network") -> Predictive:
        """The predictive distribution at inputs, or at all inputs of a loader.

        Args:
            x: what the network takes (a tensor, a tuple of positional or a dict of keyword arguments), or a loader or
                list of batches, whose targets are left aside.
            mean: `"network"` for the network's own output, untouched, `"linear"` for that of the linear model.
        """
        checks.choice("mean", mean, ("network", "linear"))
        with random_state_kept():
            parts = list(inputs_of(x))
            for number, part in enumerate(parts):
                checks.finite_inputs(part, number)
            checks.some(parts)
            centres = [self.centre(part, mean) for part in parts]
            for number, own in enumerate(centres):
                checks.finite_outputs(own.flatten(1), number)
            centre = torch.cat(centres)
        reference = self.reference * self.calibration.variance[mean]
        return Predictive(
            centre, self.noise_std(mean), self.likelihood, self._moments(parts, mean), reference, self.seed
        )

    def centre(self, inputs: Any, mean: Mean) -> Tensor:
        """The predictive mean `[n, ...]` of one batch."""
        network = self.linearised.network
        if mean == "network":
            return network.as_trained(inputs)
        moved = self.optimum if self.model == "linear" else self.optimum - network.trained.double()
        f, pushed = self.linearised.jvp(inputs, moved)
        flat = pushed if self.model == "linear" else f + pushed
        return flat.reshape(len(flat), *self.output_shape)

    def noise_std(self, mean: str) -> Tensor | None:
        """The noise standard deviation that belongs to a mean `[...]`."""
        if self.noises is None:
            return None
        variance = self.noises.network if mean == "network" else self.noises.linear
        std = (variance * self.calibration.noise[mean]).sqrt()
        dtype = self.linearised.network.dtype
        return std.expand(self.output_shape.numel()).reshape(self.output_shape).to(dtype)

    def _moments(self, parts: list[Any], mean: str) -> Moments:
        scale, dtype = self.calibration.variance[mean], self.linearised.network.dtype

        def each(moment: Callable[[Linearised, Any], Tensor]) -> Tensor:
            with random_state_kept():
                found = [checks.finite_derivatives(moment(self.linearised, some), b) for b, some in self._pieces(parts)]
                return torch.cat([scale * part for part in found]).to(dtype)

        def joint() -> Tensor:
            with random_state_kept():
                jacobian = torch.cat([self.linearised.jacobian(some) for _, some in self._pieces(parts)])
                return (scale * self.factor.joint_covariance(jacobian)).to(dtype)

        return Moments(lambda: each(self.factor.variance_of), lambda: each(self.factor.covariance_of), joint)

    def _pieces(self, parts: list[Any]) -> Iterable[tuple[int, Any]]:
        """As many inputs at a time as a twentieth of the memory holds what predicting them takes, and their batch."""
        step = max(1, int(self.memory / 20 / (8 * self.factor.numbers(self.output_shape.numel()))))
        for number, part in enumerate(parts):
            for start in range(0, count(part), step):
                yield number, map_leaves(lambda t, s=start: t[s : s + step], part)

    def calibrated(self, calibration: Calibration, reference: Tensor) -> "Posterior":
        """The same posterior with held-out scales; `reference` `[m]` are sorted epistemic scores without any scale."""
        return replace(self, calibration=calibration, reference=reference)

    @property
    def network(self) -> Network:
        """The network it belongs to."""
        return self.linearised.network

    def __str__(self) -> str:
        return "\n".join(summary(self))


def inputs_of(x: Any) -> Iterable[Any]:
    """The inputs in `x`: itself if a network could take it, else those of the batches it yields."""
    if isinstance(x, np.ndarray):
        x = torch.as_tensor(x)
    if isinstance(x, Tensor | Mapping | tuple):
        yield x
        return
    if not isinstance(x, Iterable):
        raise InputError(
            f"predict takes what the network takes, or a loader, but it got a {type(x).__name__}: pass a tensor, a tuple, "
            "a dict, a DataLoader or a list of batches"
        )
    for number, raw in enumerate(x):
        yield inputs_in(raw, number)


def inputs_in(raw: Any, number: int) -> Any:
    """The inputs of one batch of a loader, with targets or without."""
    if isinstance(raw, tuple | list) and len(raw) == 1:
        raw = raw[0]
    if isinstance(raw, Mapping) and "labels" not in raw:
        raw = dict(raw)
    elif not isinstance(raw, Tensor | np.ndarray):
        return as_batch(raw, number).inputs
    return tensors(raw, f"batch {number}")


def summary(post: Posterior) -> list[str]:
    """What a person wants to know, line by line."""
    prior, dims = post.prior, post.effective_dimensions
    total = sum(dims.values())
    lines = [
        f"Posterior of {post.linearised.size:,} weights given {post.examples:,} examples",
        f"  likelihood    {post.likelihood.name}",
        f"  model         {post.model}, curvature {post.curvature}, evidence at the {post.evidence_at} weights",
        f"  log evidence  {post.log_evidence:.3f}"
        + (f" ± {post.log_evidence_error:.2g}" if post.log_evidence_error else ""),
    ]
    if isinstance(post.likelihood, Gaussian) and post.noises is not None:
        own, net = post.noises.linear.sqrt(), post.noises.network.sqrt()
        lines.append(f"  noise         {_numbers(own)} about the linear model, {_numbers(net)} about the network")
    if post.calibration != Calibration():
        lines.append(f"  held out      {_scales(post)}")
    lines.append(f"  determined    {total:.1f} of {post.linearised.size:,} directions")
    lines.append(f"  status        {post.status}")
    width = max(5, *(len(g) for g in prior))
    lines.append(f"  {'group':<{width}}  {'precision':>11}  {'determined':>10}  {'weights':>9}")
    sizes = post.setting.prior.groups.sizes.tolist()
    for (group, precision), size in zip(prior.items(), sizes, strict=True):
        lines.append(f"  {group:<{width}}  {precision:>11.4g}  {dims[group]:>10.2f}  {int(size):>9,}")
    return lines + [f"  note: {note}" for note in post.notes]


def _scales(post: Posterior) -> str:
    """What held-out data made of the variance and of the noise, beside the evidence's own."""
    parts = []
    for mean, variance in post.calibration.variance.items():
        noise = f", noise {_numbers(std.flatten())}" if (std := post.noise_std(mean)) is not None else ""
        parts.append(f"epistemic variance × {variance:.3g}{noise} about the {mean}{' model' * (mean == 'linear')}")
    return "; ".join(parts)


def _numbers(values: Tensor) -> str:
    shown = ", ".join(f"{v:.4g}" for v in values[:4].tolist())
    return shown if len(values) <= 4 else f"{shown}, …"
