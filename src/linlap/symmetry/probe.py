"""f and its gradients on a few calibration rows: everything that detection asks of the network."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from linlap.network import Network, Weights
from linlap.state import differentiable, random_state_kept
from linlap.symmetry.idealised import Idealised, Statistics
from linlap.tree import count, leaves, map_leaves

MOST_ROWS, FEWEST_ROWS = 32, 8
MOST_NUMBERS = 2**21  # of the inputs: above it fewer rows are used
DISTURBANCE = 0.3  # of the logarithm of a weight
SMALL = 1e-3  # the root mean square below which a tensor is disturbed as if it were zero
FROM_ZERO = 0.1

RUNNING = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
EPSILONS = ("eps", "epsilon", "variance_epsilon")


@dataclass(frozen=True)
class Tolerance:
    """What counts as zero: responses against their natural size, changes and gradients of f against f."""

    response: float
    change: float
    effect: float


TOLERANCES = {torch.float64: Tolerance(1e-6, 1e-6, 1e-10), torch.float32: Tolerance(1e-3, 1e-4, 1e-5)}


@dataclass(frozen=True)
class Seen:
    """What one call of a normalisation layer took and gave."""

    taken: Tensor
    given: Tensor

    @property
    def mean(self) -> Tensor:
        """Of each channel `[C]`."""
        return self.taken.transpose(0, 1).flatten(1).mean(1)

    @property
    def variance(self) -> Tensor:
        """Of each channel `[C]`."""
        return self.taken.transpose(0, 1).flatten(1).var(1, correction=0)


@dataclass(frozen=True)
class Probe:
    """A private wide copy of a network's weights and buffers, to be changed and evaluated at will."""

    network: Network
    inputs: Any
    blur: float  # by how much the outputs change without the epsilons, relative to how much they vary
    _shifts: dict[str, frozenset[tuple[str, int]]] = field(default_factory=dict, repr=False)

    @cached_property
    def tensors(self) -> Weights:
        """Weights and buffers by name, those that get a posterior first."""
        return {**self.network.weights, **self.network.frozen}

    @cached_property
    def parameters(self) -> set[str]:
        """The names that are parameters, not buffers."""
        return {name for name, _ in self.network.module.named_parameters()}

    @cached_property
    def running(self) -> dict[str, nn.Module]:
        """Normalisation layers with running statistics."""
        return {
            name: m
            for name, m in self.network.module.named_modules()
            if isinstance(m, RUNNING) and m.running_mean is not None
        }

    @property
    def tolerance(self) -> Tolerance:
        """What counts as zero in the precision of this probe."""
        return TOLERANCES[self.network.dtype]

    # --- evaluations

    def outputs(self, changed: Weights, statistics: Statistics) -> Tensor:
        """f `[n, C]` with some tensors changed."""
        with torch.no_grad(), Idealised(statistics):
            return self.network({**self.network.weights, **changed}, self.inputs).flatten(1)

    def change(self, changed: Weights, statistics: Statistics) -> float:
        """By how much the outputs change, relative to how much they vary over the rows."""
        reference, scale = self._reference[statistics]
        difference = float((self.outputs(changed, statistics) - reference).norm()) / scale
        return difference if np.isfinite(difference) else np.inf

    @cached_property
    def _reference(self) -> dict[Statistics, tuple[Tensor, float]]:
        found: dict[Statistics, tuple[Tensor, float]] = {}
        for statistics in ("batch", "running"):
            outputs = self.outputs({}, statistics)
            found[statistics] = outputs, _variation(outputs)
        return found

    def disturbed(self, names: Sequence[str]) -> Weights:
        """The named tensors, each entry multiplied by some number of its own."""
        generator = torch.Generator().manual_seed(0)
        return {name: _nearby(self.tensors[name], generator) for name in names}

    # --- gradients

    def with_effect(self, statistics: Statistics) -> list[str]:
        """The weights whose Jacobian is not zero at θ̃."""
        sizes = {n: max(float(w.norm()), FROM_ZERO * w.numel() ** 0.5) for n, w in self.network.weights.items()}
        largest = dict.fromkeys(sizes, 0.0)
        for seed in range(3):
            gradients = self._gradients(self.network.weights, statistics, torch.Generator().manual_seed(seed))
            for name, gradient in gradients.items():
                largest[name] = max(largest[name], float(gradient.norm()) * sizes[name])
        least = self.tolerance.effect * self._reference[statistics][1]
        return [name for name, effect in largest.items() if effect > least]

    def equation(self, names: Sequence[str], statistics: Statistics, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """uᵀJ(P_g θ) `[G]` at a random u and a random θ near θ̃, and its size for unrelated weights `[G]`.

        A symmetry holds at every θ: other points rule out weights that are merely stationary, or zero, at θ̃.
        One gradient answers for all tensors at once: uᵀJ(P_g θ) = ⟨∂_g(uᵀf), θ_g⟩.
        """
        generator = torch.Generator().manual_seed(seed)
        near = {name: _nearby(w, generator) for name, w in self.network.weights.items()}
        gradients = self._gradients(near, statistics, generator)
        response = [float((gradients[n] * near[n]).sum()) for n in names]
        natural = [float(gradients[n].norm() * near[n].norm()) / near[n].numel() ** 0.5 for n in names]
        return np.array(response), np.array(natural)

    def _gradients(self, weights: Weights, statistics: Statistics, generator: torch.Generator) -> Weights:
        """∂(uᵀf)/∂θ for a random u."""
        free = {name: w.clone().requires_grad_() for name, w in weights.items()}
        with torch.enable_grad(), Idealised(statistics):
            outputs = self.network(free, self.inputs)
        u = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype).to(outputs.device)
        if not outputs.requires_grad:
            return {name: torch.zeros_like(w) for name, w in weights.items()}
        gradients = torch.autograd.grad(outputs, list(free.values()), u, allow_unused=True)
        return {
            name: torch.zeros_like(weights[name]) if gradient is None else gradient
            for name, gradient in zip(free, gradients, strict=True)
        }

    # --- what normalisation layers see

    def seen(self, changed: Weights) -> dict[str, list[Seen]]:
        """What modules with running statistics or an epsilon take and give, on batch statistics."""
        names = {m: name for name, m in self.network.module.named_modules() if name in self.running or epsilons(m)}
        calls: dict[str, list[Seen]] = {}

        def record(module: nn.Module, taken: Any, given: Any) -> None:
            if module in names and leaves(taken) and isinstance(given, Tensor):
                calls.setdefault(names[module], []).append(Seen(leaves(taken)[0], given))

        handle = register_module_forward_hook(record)
        try:
            self.outputs(changed, "batch")
        finally:
            handle.remove()
        return calls

    @cached_property
    def usual(self) -> dict[str, list[Seen]]:
        """What they take and give at θ̃."""
        return self.seen({})

    def shifts(self, name: str) -> frozenset[tuple[str, int]]:
        """The layers with running statistics, and their channels, whose batch mean this tensor shifts.

        None if it has any effect on f, which on batch statistics a bias in front of batch norm has not.
        """
        if name not in self._shifts:
            changed = self.disturbed([name])
            idle = self.change(changed, "batch") <= self.tolerance.change
            moved = _moved(self.usual, self.seen(changed), self.running, self.tolerance.change) if idle else ()
            self._shifts[name] = frozenset(moved)
        return self._shifts[name]


def _variation(outputs: Tensor) -> float:
    """The norm of the outputs about their mean over the rows, or all of it if they are constant."""
    varying, whole = float((outputs - outputs.mean(0)).norm()), float(outputs.norm())
    return (varying if varying > 1e-8 * whole else whole) or 1.0


def epsilons(module: nn.Module) -> list[str]:
    """The attributes of a module that hold an epsilon."""
    return [name for name in EPSILONS if isinstance(getattr(module, name, None), float)]


def _moved(
    usual: Mapping[str, list[Seen]], now: Mapping[str, list[Seen]], layers: Iterable[str], tolerance: float
) -> Iterator[tuple[str, int]]:
    for layer in layers:
        for before, after in zip(usual.get(layer, []), now.get(layer, []), strict=True):
            size = before.variance.sqrt() + before.mean.abs() + after.mean.abs()
            moved = (after.mean - before.mean).abs() > tolerance * size
            yield from ((layer, int(channel)) for channel in moved.nonzero().flatten())


def _nearby(w: Tensor, generator: torch.Generator) -> Tensor:
    """Each entry times a random positive number, so that θ stays in the domain of f; a zero tensor moves."""
    noise = torch.randn(w.shape, generator=generator, dtype=w.dtype).to(w.device)
    small = float(w.norm()) <= SMALL * w.numel() ** 0.5
    return w + FROM_ZERO * noise if small else w * torch.exp(DISTURBANCE * noise)


@contextmanager
def probing(network: Network, inputs: Any) -> Iterator[Probe]:
    """A probe of the network, in float64 wherever the network can run in it."""
    rows = _rows(inputs)
    default = torch.get_default_dtype()
    with random_state_kept(), differentiable(network.module):
        try:
            yield _first_that_runs(network, rows)
        finally:
            torch.set_default_dtype(default)


def _first_that_runs(network: Network, rows: Any) -> Probe:
    """Tensors that the network makes as it runs have the default type, so that it must be wide as well."""
    try:
        torch.set_default_dtype(torch.float64)
        return _wide(network, rows, torch.float64)
    except (RuntimeError, TypeError):  # a constant or a cast of the network insists on another type
        torch.set_default_dtype(network.dtype)
        return _wide(network, rows, network.dtype)


def _wide(network: Network, inputs: Any, dtype: torch.dtype) -> Probe:
    def widened(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    rows = map_leaves(widened, inputs)
    weights = {name: widened(w) for name, w in network.weights.items()}
    frozen = {name: widened(t) for name, t in network.frozen.items()}
    with torch.no_grad():
        usual = Network(network.module, weights, frozen)(weights, rows).flatten(1)
    for name, module in network.module.named_modules():
        variance = f"{name}.running_var" if name else "running_var"
        if isinstance(module, RUNNING) and variance in frozen:  # (s² + ε) scales by k² as a whole
            frozen = frozen | {variance: frozen[variance] + module.eps}
    probe = Probe(Network(network.module, weights, frozen), rows, 0.0)
    blur = float((probe.outputs({}, "running") - usual).norm()) / _variation(usual)
    return replace(probe, blur=blur)


def _rows(inputs: Any) -> Any:
    """At most 32 rows, fewer of large inputs, and at least 8: batch statistics of very few say little."""
    n = count(inputs)
    each = sum(leaf.numel() for leaf in leaves(inputs)) // max(n, 1)
    most = min(MOST_ROWS, max(FEWEST_ROWS, MOST_NUMBERS // max(each, 1)))
    chosen = torch.arange(min(n, most)) if n >= FEWEST_ROWS else torch.arange(FEWEST_ROWS) % n
    generator = torch.Generator().manual_seed(0)

    def rows(leaf: Tensor) -> Tensor:
        if leaf.ndim == 0 or len(leaf) != n:
            return leaf
        taken = leaf[chosen.to(leaf.device)]
        if n >= FEWEST_ROWS or not leaf.is_floating_point():
            return taken
        noise = torch.randn(taken.shape, generator=generator, dtype=torch.float64)
        return taken * torch.exp(DISTURBANCE * noise).to(taken)

    return map_leaves(rows, inputs)
