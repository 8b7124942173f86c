"""Gradients of a weight, of each example by itself, as sums of outer products."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NUMBERS = 2**24
"""Numbers of per-example gradients held at once."""

Side = Literal["left", "right"]
Basis = Tensor | None
"""Eigenvectors `[G, d, d]` in columns, None for the identity."""


@dataclass(frozen=True)
class Outer:
    """The gradient `[n, G, L, R]` of a weight matrix is Σ_t left_t right_tᵀ.

    `left` `[n, T, G, L]`, `right` `[n, T, G, R]`: G independent groups, T places at which one example uses the weight.
    """

    left: Tensor
    right: Tensor

    @property
    def places(self) -> int:
        """T."""
        return self.left.shape[1]

    def rotated(self, left: Basis, right: Basis) -> "Outer":
        """In other bases."""
        return Outer(_into(self.left, left), _into(self.right, right))

    def gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Some examples at a time with their gradients `[n, G, L, R]`."""
        n, t, g, rows_of = self.left.shape
        step = max(1, NUMBERS // (g * rows_of * self.right.shape[3]))
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            left, right = self.left[rows].movedim(2, 1), self.right[rows].movedim(2, 1)  # [n, G, T, ·]
            yield rows, left.mT @ right if t > 1 else left.squeeze(2).unsqueeze(-1) * right.squeeze(2).unsqueeze(-2)

    def flat(self) -> "Outer":
        """The gradient as one row `[n, 1, G, L·R]` beside a left side of ones."""
        whole = torch.cat([part for _, part in self.gradients()]).flatten(2).unsqueeze(1)
        return Outer(torch.ones_like(whole[..., :1]), whole)

    def squares(self) -> Tensor:
        """Squared gradients, summed over the examples `[G, L, R]`, float64."""
        if self.places == 1:
            left, right = (side.squeeze(1).square().movedim(1, 0) for side in (self.left, self.right))  # [G, n, ·]
            return (left.mT @ right).double()
        total = self.left.new_zeros(*self.left.shape[2:], self.right.shape[3], dtype=torch.float64)
        for _, part in self.gradients():
            total += part.square().sum(0)
        return total

    def quadratic(self, weight: Tensor) -> Tensor:
        """Σ weight·gradient² of each example `[n]`, weight `[G, L, R]`."""
        if self.places == 1:
            left, right = (side.squeeze(1).square().movedim(1, 0) for side in (self.left, self.right))
            return ((left @ weight.to(left)) * right).sum((0, 2))
        along = weight.flatten().to(self.left)
        return torch.cat([part.flatten(1).square() @ along for _, part in self.gradients()])

    def side(self, side: Side) -> Tensor:
        """Either of them."""
        return self.left if side == "left" else self.right

    def moment(self, side: Side) -> Tensor:
        """Second moments `[G, d, d]` of a side over examples and places, float64."""
        return _moment(self.side(side))


@dataclass(frozen=True)
class Tokens:
    """The gradient `[n, V, R]` of a table is Σ_t e_{token_t} right_tᵀ; `tokens` `[n, T]`, `right` `[n, T, 1, R]`."""

    tokens: Tensor
    right: Tensor
    rows: int

    def rotated(self, left: Basis, right: Basis) -> "Tokens":  # noqa: ARG002 (rows of a table stay apart)
        """In another basis on the right."""
        return Tokens(self.tokens, _into(self.right, right), self.rows)

    def _by_token(self) -> tuple[Tensor, Tensor, Tensor]:
        """Examples, tokens and gradients of the rows of the table that an example uses, each once."""
        n = len(self.tokens)
        own = torch.arange(n, device=self.tokens.device).unsqueeze(1) * self.rows + self.tokens
        pairs, place = own.flatten().unique(return_inverse=True)
        sums = self.right.new_zeros(len(pairs), self.right.shape[3])
        sums.index_add_(0, place, self.right.flatten(0, 2))
        return pairs // self.rows, pairs % self.rows, sums

    def squares(self) -> Tensor:
        """Squared gradients, summed over the examples `[1, V, R]`, float64."""
        _, tokens, sums = self._by_token()
        total = torch.zeros(self.rows, sums.shape[1], dtype=torch.float64, device=sums.device)
        return total.index_add_(0, tokens, sums.double().square()).unsqueeze(0)

    def quadratic(self, weight: Tensor) -> Tensor:
        """Σ weight·gradient² of each example `[n]`, weight `[1, V, R]`."""
        examples, tokens, sums = self._by_token()
        each = (sums.square() * weight[0, tokens].to(sums)).sum(1)
        return each.new_zeros(len(self.tokens)).index_add_(0, examples, each)

    def side(self, side: Side) -> Tensor:  # noqa: ARG002
        """What comes back."""
        return self.right

    def moment(self, side: Side) -> Tensor:  # noqa: ARG002 (rows of a table stay apart: it is always the right one)
        """Second moments `[1, R, R]` of what comes back, float64."""
        return _moment(self.right)

    def gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Some examples at a time with their gradients `[n, 1, V, R]`."""
        step = max(1, NUMBERS // (self.rows * self.right.shape[3]))
        for start in range(0, len(self.tokens), step):
            rows = slice(start, min(start + step, len(self.tokens)))
            tokens, right = self.tokens[rows], self.right[rows].squeeze(2)
            whole = right.new_zeros(len(tokens), self.rows, right.shape[2])
            whole.scatter_add_(1, tokens.unsqueeze(-1).expand_as(right), right)
            yield rows, whole.unsqueeze(1)


Term = Outer | Tokens


def together(terms: Sequence[Term]) -> Term | None:
    """The sum of the gradients of several uses of one weight: more places; None if they are of different kinds."""
    outer, tokens = [t for t in terms if isinstance(t, Outer)], [t for t in terms if isinstance(t, Tokens)]
    if len(terms) == 1:
        return terms[0]
    if len(outer) == len(terms):
        return Outer(torch.cat([t.left for t in outer], 1), torch.cat([t.right for t in outer], 1))
    if len(tokens) == len(terms):
        return Tokens(torch.cat([t.tokens for t in tokens], 1), torch.cat([t.right for t in tokens], 1), tokens[0].rows)
    return None


def _into(side: Tensor, basis: Basis) -> Tensor:
    """Rows `[n, T, G, d]` in a basis `[G, d, d]`."""
    if basis is None:
        return side
    if len(basis) == 1:
        return (side.reshape(-1, side.shape[3]) @ basis[0].to(side.dtype)).reshape(side.shape)  # one product, not n·T
    return torch.einsum("ntgd,gde->ntge", side, basis.to(side.dtype))


def _moment(side: Tensor) -> Tensor:
    """Σ rows rowsᵀ of `[n, T, G, d]`."""
    rows = side.flatten(0, 1).movedim(1, 0)
    return (rows.mT @ rows).double()
