"""The linear model h = c + J θ with its likelihood and its data: everything the data are swept for."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from linlap import checks
from linlap.data import Batch, collect
from linlap.errors import InputError
from linlap.features import Linearised, Model
from linlap.likelihood import Likelihood
from linlap.targets import Targets
from linlap.tree import count, from_named_values, leaves, named_values

SMALL_EXAMPLE = 65536
"""Bytes of an input up to which sweeps take whole merged batches."""


class Sweeps(ABC):
    """Products with the Jacobian J `[N·C, P]` of all training outputs, in float64."""

    @abstractmethod
    def forward(self, vectors: Tensor) -> Tensor:
        """J·vectors `[N, C]` from `[P]`, or `[N, C, m]` from `[P, m]`."""

    @abstractmethod
    def backward(self, outputs: Tensor) -> Tensor:
        """Jᵀ·outputs `[P]` from `[N, C]`, or `[P, m]` from `[N, C, m]`."""

    @abstractmethod
    def there_and_back(self, vector: Tensor, curve: Callable[[slice, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """J·vector `[N, C]` and Jᵀ·curve(J·vector) `[P]`, either with columns `[..., m]`, in one sweep."""

    @abstractmethod
    def jacobians(self, rows_at_once: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows of examples and their J `[n, C, P]`."""

    @abstractmethod
    def pulled(self, cotangents: Callable[[slice], Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Rows of examples, a few at a time, and their UᵀJ `[n, R, P]`, for cotangents U `[n, R, C]` of these rows."""


@dataclass
class Streamed(Sweeps):
    """The network is differentiated anew at every sweep; nothing of size P·N is held."""

    linearised: Linearised
    batches: list[Batch]
    outputs: int
    passes: int = 0

    def _parts(self) -> Iterator[tuple[slice, Any]]:
        for rows, batch in self._batches():
            yield rows, batch.inputs

    def _batches(self) -> Iterator[tuple[slice, Batch]]:
        self.passes += 1
        start = 0
        for batch in self.batches:
            yield slice(start, start + len(batch)), batch
            start += len(batch)

    def _empty(self, *columns: int) -> Tensor:
        n = sum(len(b) for b in self.batches)
        return torch.zeros(n, self.outputs, *columns, dtype=torch.float64, device=self.linearised.network.device)

    def forward(self, vectors: Tensor) -> Tensor:
        """J·vectors, all columns in one pass."""
        pushed = self._empty(*vectors.shape[1:])
        for rows, inputs in self._parts():
            pushed[rows] = self._pushed(inputs, vectors)
        return pushed

    def backward(self, outputs: Tensor) -> Tensor:
        """Jᵀ·outputs, all columns in one pass."""
        pulled = torch.zeros(self.linearised.size, *outputs.shape[2:], dtype=torch.float64, device=outputs.device)
        for rows, inputs in self._parts():
            pulled += self._pulled_back(inputs, outputs[rows])
        return pulled

    def _pulled_back(self, inputs: Any, outputs: Tensor) -> Tensor:
        """Jᵀ·outputs `[P]` of one batch from `[n, C]`, or `[P, m]` from `[n, C, m]`."""
        pull = self.linearised.vjp(inputs)[1]
        columns = outputs.reshape(*outputs.shape[:2], -1).unbind(-1)
        return torch.stack([pull(column).double() for column in columns], -1).reshape(-1, *outputs.shape[2:])

    def there_and_back(self, vector: Tensor, curve: Callable[[slice, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """J·vector and Jᵀ·curve(J·vector)."""
        pushed, pulled = self._empty(*vector.shape[1:]), torch.zeros((), dtype=torch.float64, device=vector.device)
        for rows, inputs in self._parts():
            pushed[rows] = self._pushed(inputs, vector)
            pulled = pulled + self._pulled_back(inputs, curve(rows, pushed[rows]))
        return pushed, pulled

    def _pushed(self, inputs: Any, vectors: Tensor) -> Tensor:
        """J·vectors `[n, C]` of one batch from `[P]`, or `[n, C, m]` from `[P, m]`."""
        columns = vectors.reshape(len(vectors), -1).unbind(-1)
        pushed = torch.stack([self.linearised.jvp(inputs, column)[1].double() for column in columns], -1)
        return pushed.reshape(*pushed.shape[:2], *vectors.shape[1:])

    def jacobians(self, rows_at_once: int) -> Iterator[tuple[slice, Tensor]]:
        """J, some rows at a time."""
        at_once = _rows(self.outputs * self.linearised.size)
        for rows, batch in self._some(rows_at_once):
            own = [batch.rows(i, i + at_once) for i in range(0, len(batch), at_once)]
            found = torch.cat([self.linearised.jacobian(part.inputs) for part in own])
            yield rows, checks.finite_derivatives(found, batch.origin)

    def pulled(self, cotangents: Callable[[slice], Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """UᵀJ, some rows at a time."""
        for rows, batch in self._some(_rows(self.outputs * self.linearised.size)):
            yield rows, checks.finite_derivatives(self.linearised.pulled(batch.inputs, cotangents(rows)), batch.origin)

    def _some(self, rows_at_once: int) -> Iterator[tuple[slice, Batch]]:
        for rows, batch in self._batches():
            for start in range(0, len(batch), rows_at_once):
                part = batch.rows(start, start + rows_at_once)
                yield slice(rows.start + start, rows.start + start + len(part)), part


@dataclass
class Stored(Sweeps):
    """J is held in memory: a sweep is a matrix product."""

    jacobian: Tensor

    def forward(self, vectors: Tensor) -> Tensor:
        """J·vectors."""
        return self.jacobian @ vectors

    def backward(self, outputs: Tensor) -> Tensor:
        """Jᵀ·outputs."""
        return self.jacobian.flatten(0, 1).mT @ outputs.flatten(0, 1)

    def there_and_back(self, vector: Tensor, curve: Callable[[slice, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """J·vector and Jᵀ·curve(J·vector)."""
        pushed = self.forward(vector)
        return pushed, self.backward(curve(slice(0, len(pushed)), pushed))

    def jacobians(self, rows_at_once: int) -> Iterator[tuple[slice, Tensor]]:
        """J, some rows at a time."""
        for start in range(0, len(self.jacobian), rows_at_once):
            part = self.jacobian[start : start + rows_at_once]
            yield slice(start, start + len(part)), part

    def pulled(self, cotangents: Callable[[slice], Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """UᵀJ, some rows at a time."""
        for rows, part in self.jacobians(_rows(self.jacobian[0].numel())):
            yield rows, cotangents(rows) @ part


@dataclass(frozen=True)
class Problem:
    """A convex problem: Σ ℓ(c + J θ, y) over N examples with C outputs each.

    `network_outputs` is f(θ̃, x) `[N, C]`, `offset` is c: zero for the linear model, f − J θ̃ for the affine one.
    """

    linearised: Linearised
    model: Model
    likelihood: Likelihood
    targets: Targets
    network_outputs: Tensor
    offset: Tensor
    sweeps: Sweeps
    output_shape: torch.Size
    batches: list[Batch] = field(repr=False)
    memory: int

    @property
    def examples(self) -> int:
        """N."""
        return len(self.network_outputs)

    @property
    def outputs(self) -> int:
        """C."""
        return self.network_outputs.shape[1]

    @property
    def weights(self) -> int:
        """P."""
        return self.linearised.size

    @property
    def trained(self) -> Tensor:
        """θ̃ `[P]` in float64."""
        return self.linearised.network.trained.double()

    @property
    def passes(self) -> int:
        """Sweeps over the data so far that went through the network."""
        return self.sweeps.passes if isinstance(self.sweeps, Streamed) else 0

    @property
    def passes_are_free(self) -> bool:
        """Is J held in memory?"""
        return isinstance(self.sweeps, Stored)

    def at(self, likelihood: Likelihood) -> "Problem":
        """The same problem under another noise."""
        return replace(self, likelihood=likelihood)

    def linear_outputs(self, weights: Tensor) -> Tensor:
        """h(θ) = c + J θ `[N, C]`."""
        return self.offset + self.sweeps.forward(weights)

    def loss(self, outputs: Tensor) -> float:
        """Σ ℓ."""
        return float(self.likelihood.loss(outputs, self.targets).sum())

    def gradient(self, outputs: Tensor) -> Tensor:
        """Jᵀ r `[P]`."""
        return self.sweeps.backward(self.likelihood.residual(outputs, self.targets))

    def curved(self, outputs: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        """J·vector `[N, C]` and JᵀW J·vector `[P]`, W at `outputs`."""

        def curve(rows: slice, pushed: Tensor) -> Tensor:
            return self.likelihood.curve(outputs[rows], self.targets.rows(rows), pushed)

        return self.sweeps.there_and_back(vector, curve)

    def pulled_and_curved(self, outputs: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Jᵀr `[P]`, J·vector `[N, C]` and JᵀW J·vector `[P]`, r and W at `outputs`."""

        def both(rows: slice, pushed: Tensor) -> Tensor:
            there = outputs[rows], self.targets.rows(rows)
            return torch.stack([self.likelihood.residual(*there), self.likelihood.curve(*there, pushed)], -1)

        pushed, pulled = self.sweeps.there_and_back(vector, both)
        return pulled[:, 0], pushed, pulled[:, 1]

    def features(self) -> dict[str, Tensor]:
        """What J comes from: J itself where it is held, else the inputs, by the names `recalled` reads."""
        if isinstance(self.sweeps, Stored):
            return {"jacobian": self.sweeps.jacobian}
        named = [(f"{b}.{path}", v) for b, batch in enumerate(self.batches) for path, v in named_values(batch.inputs)]
        tensors = {f"inputs.{path}": value for path, value in named if isinstance(value, Tensor)}
        return tensors | {"plain": _as_json({path: v for path, v in named if not isinstance(v, Tensor)})}

    def rows_at_once(self, share: float = 0.05) -> int:
        """How many examples' Jacobians fit that share of the memory."""
        item = (
            self.network_outputs.element_size()
            if isinstance(self.sweeps, Stored)
            else self.linearised.network.trained.element_size()
        )
        return max(1, int(share * self.memory / (self.outputs * self.weights * item)))


def pose(linearised: Linearised, data: Any, likelihood: Likelihood, model: Model, memory: int) -> Problem:
    """Read the data once, check them and the network, and keep what every later sweep needs."""
    network = linearised.network
    batches = collect(data, network.device)
    shape = checks.network_on(linearised, batches[0])
    likelihood = likelihood.shaped(shape, batches[0].targets.shape[1:])
    outputs, targets = [], []
    for batch in batches:
        outputs.append(checks.outputs_on(linearised, batch, shape).double())
        targets.append(likelihood.targets(batch.targets, batch.weights, shape))
    f = torch.cat(outputs)
    together = checks.targets_count(
        Targets(torch.cat([t.values for t in targets]), torch.cat([t.weight for t in targets]))
    )
    streamed = Streamed(linearised, _split(batches), f.shape[1])
    sweeps: Sweeps = streamed
    if f.numel() * linearised.size * 8 <= memory // 4:
        parts = [j.double() for _, j in streamed.jacobians(_rows(f.shape[1] * linearised.size))]
        sweeps = Stored(torch.cat(parts).contiguous())
    offset = torch.zeros_like(f) if model == "linear" else f - sweeps.forward(network.trained.double())
    return Problem(linearised, model, likelihood, together, f, offset, sweeps, shape, batches, memory)


def recalled(
    linearised: Linearised, likelihood: Likelihood, targets: Targets, tensors: dict[str, Tensor], memory: int
) -> Problem:
    """The features of a problem again, from what `Problem.features` gave."""
    outputs = tensors["outputs"]
    if "jacobian" in tensors:
        sweeps: Sweeps = Stored(tensors["jacobian"])
    else:
        sweeps = Streamed(linearised, _remembered(tensors), outputs.shape[1])
    shape = outputs.shape[1:]
    return Problem(
        linearised, "linear", likelihood, targets, outputs, torch.zeros_like(outputs), sweeps, shape, [], memory
    )


def _remembered(tensors: dict[str, Tensor]) -> list[Batch]:
    """Batches from the names `inputs.<batch>.<path>`."""
    named = {name.removeprefix("inputs."): t for name, t in tensors.items() if name.startswith("inputs.")}
    by_batch: dict[int, dict[str, Any]] = {}
    for name, value in [*named.items(), *json.loads(bytes(tensors["plain"].tolist())).items()]:
        batch, path = name.split(".", 1)
        by_batch.setdefault(int(batch), {})[path] = value
    inputs = [from_named_values(by_batch[b]) for b in sorted(by_batch)]
    return _split([Batch(tree, torch.empty(count(tree))) for tree in inputs])


def _as_json(values: dict[str, Any]) -> Tensor:
    """What the inputs hold beside tensors, as bytes of JSON."""
    for path, value in values.items():
        if not isinstance(value, bool | int | float | str | None):
            raise InputError(
                f"inputs must consist of tensors, numbers, texts and None to be kept in a file, but {path!r} is a "
                f"{type(value).__name__}: make it a tensor, or give the fit more memory= so that the features are kept instead"
            )
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def _rows(size: int) -> int:
    """Examples whose Jacobians, each of that many numbers, are taken together: more of them are slower, not faster."""
    return max(16, 2**23 // size)


def _split(batches: list[Batch]) -> list[Batch]:
    """Merged batches of large examples are cut back to what one forward pass should hold."""
    parts = []
    for batch in batches:
        size = sum(leaf[:1].numel() * leaf.element_size() for leaf in leaves(batch.inputs))
        step = max(1, len(batch) if size <= SMALL_EXAMPLE else 2**25 // size)
        parts += [batch.rows(i, i + step) for i in range(0, len(batch), step)]
    return parts
