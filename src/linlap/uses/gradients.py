"""Gradients of every weight on one batch, one column of cotangents after another, in the bases that are asked for."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from linlap.features import Linearised
from linlap.uses.coverage import PLACINGS, Coverage
from linlap.uses.operations import Use
from linlap.uses.outer import Basis, Outer, Term
from linlap.uses.recorder import Watched


class Gradients:
    """Gradients of the network's outputs on some inputs; `coverage` says which weights are seen as outer products."""

    def __init__(self, linearised: Linearised, inputs: Any, coverage: Coverage) -> None:
        self.linearised, self.inputs, self.coverage = linearised, inputs, coverage
        self._turned: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    @cached_property
    def watched(self) -> Watched:
        """The forward pass."""
        return Watched(self.linearised, self.inputs)

    @property
    def outputs(self) -> Tensor:
        """The network's outputs `[n, C]`."""
        return self.watched.outputs.detach()

    @cached_property
    def heads(self) -> dict[str, Tensor | None]:
        """Weights whose only use gives the network's outputs themselves: what enters it `[n, R]`, None for an offset."""
        own = get_gradient_edge(self.watched.outputs)
        uses: dict[str, list[Use]] = {}
        for use in self.watched.uses:
            uses.setdefault(use.name, []).append(use)
        found: dict[str, Tensor | None] = {}
        for name, (first, *others) in uses.items():
            seen = self.coverage.weights.get(name)
            if seen is None or others or first.edge != own or seen.tokens or seen.places != ("leading",):
                continue
            n, c = self.outputs.shape
            term = first.term(self.outputs, PLACINGS["leading"](n))
            if not isinstance(term, Outer) or term.places > 1 or seen.shape[0] > 1:
                continue
            if term.right.shape[3] == c and torch.equal(term.right.reshape(n, c), self.outputs):
                found[name] = None
            elif term.left.shape[3] == c and torch.equal(term.left.reshape(n, c), self.outputs):
                found[name] = term.right.reshape(n, -1)
        return found

    def columns(self, cotangents: Tensor) -> Iterator[dict[str, Term]]:
        """For each of R cotangents `[n, R, C]` the gradient of every weight: sums of outer products, or whole rows."""
        rest = self._rest(cotangents)
        for r in range(cotangents.shape[1]):
            terms = self.coverage.terms(self.watched, cotangents[:, r]) if self.coverage.weights else {}
            for name, rows in rest.items():
                row = rows[:, r].reshape(len(rows), 1, 1, -1)
                terms[name] = Outer(torch.ones_like(row[..., :1]), row)
            yield terms

    def _rest(self, cotangents: Tensor) -> dict[str, Tensor]:
        """Rows `[n, R, ...]` of the weights that are not understood, example by example."""
        network = self.linearised.network
        left = {name: w for name, w in network.weights.items() if name not in self.coverage.weights}
        if not left:
            return {}
        others = {name: w for name, w in network.weights.items() if name in self.coverage.weights}
        part = Linearised(replace(network, weights=left, frozen={**network.frozen, **others}))
        return part.network.layout.split(part.pulled(self.inputs, cotangents))

    def turned(self, name: str, term: Term, left: Basis, right: Basis) -> Term:
        """A term in other bases; the side that all columns share is turned once."""
        if not isinstance(term, Outer):
            return term.rotated(left, right)
        return Outer(self._side(name, "left", term, left), self._side(name, "right", term, right))

    def _side(self, name: str, side: str, term: Outer, basis: Basis) -> Tensor:
        own: Tensor = getattr(term, side)
        if basis is None:
            return own
        known = self._turned.get((name, side))
        if known is not None and known[0].data_ptr() == own.data_ptr() and known[0].shape == own.shape:
            return known[1]
        turned = getattr(term.rotated(basis if side == "left" else None, basis if side == "right" else None), side)
        self._turned[name, side] = (own, turned)
        return turned
