"""Kronecker factors, eigenvalue-corrected: H of a weight matrix in the eigenbasis of what enters it and of what comes back.

The basis is that of Kronecker-factored curvature, the numbers along it are exact (EKFAC). What is no matrix gets a dense
block of its own where it is small, and a diagonal where it is not.
"""

from linlap.curvature.base import Cost
from linlap.curvature.rotated import Rotated
from linlap.uses.coverage import Shape, Understood

LARGEST_DENSE = 1024
"""Weights of one group for which a dense block is made."""


class Kron(Rotated):
    """The choice of Kronecker factors."""

    name = "kron"

    def plan(self, row: Shape, seen: Understood | None) -> tuple[str, Shape]:
        """A matrix in bases of its sides, the rest in one of its own, or none where that would be too large."""
        if seen is None:
            return ("dense" if row[2] <= LARGEST_DENSE else "diagonal"), row
        groups, left, right = seen.shape
        if seen.tokens:
            return "table", seen.shape
        if left == 1 or right == 1:
            small = left * right <= LARGEST_DENSE
            return ("dense", (groups, 1, left * right)) if small else ("diagonal", seen.shape)
        return "kron", seen.shape

    def cost(self, examples: int, outputs: int, weights: int, precisions: int) -> Cost:  # noqa: ARG002
        """Two backward passes for each output, and the eigenvectors of square layers."""
        return Cost(24.0 * examples * outputs * weights + 40.0 * weights**1.5, 24 * 8 * weights)
