"""Which weights are understood: their recorded uses reproduce their gradient, example by example, on a few examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linlap.features import Linearised
from linlap.tree import count
from linlap.uses.operations import Arrange, Shape, Use
from linlap.uses.outer import Outer, Term, Tokens, together
from linlap.uses.recorder import Watched

AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-8}
"""Relative to the gradient."""


def leading(n: int) -> Arrange:
    """The batch axis comes first, folded with others behind it."""
    return lambda tensor: tensor.reshape(n, -1, *tensor.shape[1:])


def second(n: int) -> Arrange:  # noqa: ARG001 (it is there to be seen)
    """The batch axis comes second, as in sequences that are laid out by time."""
    return lambda tensor: tensor.transpose(0, 1).unsqueeze(2)


def interleaved(n: int) -> Arrange:
    """The batch axis comes first, folded with others before it."""
    return lambda tensor: tensor.reshape(-1, n, *tensor.shape[1:]).transpose(0, 1)


PLACINGS: dict[str, Callable[[int], Arrange]] = {"leading": leading, "second": second, "interleaved": interleaved}


@dataclass(frozen=True)
class Understood:
    """A weight as G matrices `[L, R]`, and where the examples lie at each of its uses."""

    shape: Shape
    places: tuple[str, ...]
    tokens: bool


@dataclass(frozen=True)
class Coverage:
    """The weights that are understood, by name; the others have none."""

    weights: dict[str, Understood]

    def terms(self, watched: Watched, cotangents: Tensor) -> dict[str, Term]:
        """Gradients of every understood weight as outer products, for one cotangent `[n, C]` of each example."""
        uses = [use for use in watched.uses if use.name in self.weights]
        gradients = watched.gradients(cotangents, uses)
        n = len(cotangents)
        found: dict[str, list[Term]] = {name: [] for name in self.weights}
        for use, gradient in zip(uses, gradients, strict=True):
            parts = found[use.name]
            place = self.weights[use.name].places[len(parts)]
            parts.append(use.term(gradient, PLACINGS[place](n)))
        summed = {name: together(parts) for name, parts in found.items()}
        return {name: term for name, term in summed.items() if term is not None}


def understood(linearised: Linearised, inputs: Any) -> Coverage:
    """Certify what is seen on a few examples."""
    watched, n = Watched(linearised, inputs), count(inputs)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(watched.outputs.shape, generator=generator, dtype=torch.float64).to(watched.outputs)
    ends = [torch.zeros_like(u) for _ in range(2)]
    ends[0][0], ends[1][n - 1] = u[0], u[n - 1]
    by_name: dict[str, list[Use]] = {}
    for use in watched.uses:
        by_name.setdefault(use.name, []).append(use)
    seen = [dict(zip(watched.uses, watched.gradients(end, watched.uses), strict=True)) for end in ends]
    wanted = [watched.weight_gradients(end) for end in ends]
    found = {}
    for name, uses in by_name.items():
        if one := _certified(uses, seen, [w[name] for w in wanted], n):
            found[name] = one
    return Coverage(found)


def _certified(uses: list[Use], seen: list[dict[Use, Tensor]], wanted: list[Tensor], n: int) -> Understood | None:
    """The weight's uses together, if they give its gradient for the first example and for the last."""
    if len({use.shape for use in uses}) > 1:
        return None
    places = []
    for use in uses:
        fitting = [place for place in PLACINGS if _fits(place, [s[use] for s in seen], n)]
        if not fitting:
            return None
        places.append(fitting[0])
    term = None
    for gradients, want, example in zip(seen, wanted, (0, n - 1), strict=True):
        try:
            term = together([use.term(gradients[use], PLACINGS[p](n)) for use, p in zip(uses, places, strict=True)])
        except RuntimeError:  # shapes that do not fold into examples
            return None
        tolerance = AGREEMENT.get(want.dtype, 1e-3) * float(want.norm())
        got = None if term is None else _gradient(term, example)
        if got is None or got.numel() != want.numel() or float((got.reshape(want.shape) - want).norm()) > tolerance:
            return None
    return Understood(uses[0].shape, tuple(places), isinstance(term, Tokens))


def _fits(place: str, gradients: list[Tensor], n: int) -> bool:
    """Are the gradients of the first and of the last example where that placing says, and nowhere else?"""
    for gradient, example in zip(gradients, (0, n - 1), strict=True):
        axis = 1 if place == "second" else 0
        length = gradient.shape[axis] if gradient.ndim > axis else 0
        if length == 0 or length % n or (place == "second" and length != n):
            return False
        placed = PLACINGS[place](n)(gradient)
        others = torch.cat([placed[:example], placed[example + 1 :]])
        if others.numel() and float(others.abs().max()) > 1e-6 * float(gradient.abs().max()):
            return False
    return True


def _gradient(term: Term, example: int) -> Tensor:
    """The gradient of one example."""
    one = slice(example, example + 1)
    if isinstance(term, Outer):
        return torch.cat([part for _, part in Outer(term.left[one], term.right[one]).gradients()])
    whole = term.right.new_zeros(term.rows, term.right.shape[3])
    return whole.index_add_(0, term.tokens[example], term.right[example].flatten(0, 1))
