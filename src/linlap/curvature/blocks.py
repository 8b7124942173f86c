"""Blocks of weights, each with a basis in which the curvature is taken to be diagonal."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linlap.uses.coverage import Shape
from linlap.uses.outer import Basis, Outer, Side, Term

LARGEST_SIDE = 8192
"""Side of a matrix for which a basis is found."""


@dataclass(frozen=True)
class Block:
    """One weight as G matrices `[L, R]` with orthogonal bases on either side, None for the identity.

    Of kind "dense" the gradient is taken as one row of numbers, so that the right side's basis is one of all of them.
    """

    name: str
    place: slice
    shape: Shape
    kind: str
    left: Basis = None
    right: Basis = None

    @property
    def sides(self) -> list[Side]:
        """The sides that get a basis: a dense block has but one, of all its numbers."""
        if self.kind == "diagonal":
            return []
        known: dict[Side, int] = {"left": self.shape[1], "right": self.shape[2]}
        wanted: list[Side] = ["left", "right"] if self.kind == "kron" else ["right"]
        return [side for side in wanted if 1 < known[side] <= LARGEST_SIDE]

    @property
    def size(self) -> int:
        """How many weights."""
        return self.place.stop - self.place.start

    def seen(self, term: Term) -> Term:
        """The gradient in the block's own form."""
        return term.flat() if self.kind == "dense" and isinstance(term, Outer) else term

    def matrices(self, flat: Tensor) -> Tensor:
        """This block's part of vectors `[..., P]` as `[..., G, L, R]`."""
        return flat[..., self.place].reshape(*flat.shape[:-1], *self.shape)

    def rotate(self, flat: Tensor) -> Tensor:
        """Coordinates `[m, d]` in the bases of this block's part of `[m, P]`."""
        return self._turn(self.matrices(flat), self.left, self.right).flatten(1)

    def back(self, coordinates: Tensor) -> Tensor:
        """The vector `[m, d]` with these coordinates."""
        inverse = [None if basis is None else basis.mT for basis in (self.left, self.right)]
        return self._turn(coordinates.reshape(-1, *self.shape), *inverse).flatten(1)

    def spread(self, values: Tensor) -> Tensor:
        """The diagonal `[d]` of Q diag(values) Qᵀ."""
        squares = [None if basis is None else basis.square().mT for basis in (self.left, self.right)]
        return self._turn(values.reshape(1, *self.shape), *squares).flatten()

    @staticmethod
    def _turn(matrices: Tensor, left: Basis, right: Basis) -> Tensor:
        if left is not None:
            matrices = left.to(matrices.dtype).mT @ matrices
        if right is not None:
            matrices = matrices @ right.to(matrices.dtype)
        return matrices


def eigenbasis(moment: Tensor) -> Tensor:
    """Eigenvectors `[G, d, d]` in columns, contiguous as they come back from a file."""
    return torch.linalg.eigh(0.5 * (moment + moment.mT))[1].contiguous()


def covered(blocks: Sequence[Block]) -> dict[str, int]:
    """How many weights each kind of block covers."""
    found: dict[str, int] = {}
    for block in blocks:
        found[block.kind] = found.get(block.kind, 0) + block.size
    return found
