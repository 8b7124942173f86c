"""What the conjugate gradients for the weights go by: a Σ at hand, corrected by what they have seen so far.

The factorised H has its W at the trained network, which is confident where the linear model is not yet. Products of
the Hessian where it is wanted come along with every conjugate-gradient iteration; a limited-memory BFGS update makes the
Σ exact on them, across iterations and Newton steps, at no further pass over the data.
"""

from collections.abc import Callable

from torch import Tensor

Solve = Callable[[Tensor], Tensor]
"""Σ·vectors, `[P]` or `[P, m]`."""

MOST, FEWEST = 40, 3
"""Products remembered, and where memory is short."""

SHARE = 0.1
"""Of the memory, for what is remembered."""


class Memory:
    """Directions s with their products y = (JᵀWJ + Λ)s, as many as a share of so many bytes holds."""

    def __init__(self, weights: int, memory: int) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.most = max(FEWEST, min(MOST, int(SHARE * memory / (16 * weights))))

    def add(self, step: Tensor, product: Tensor) -> None:
        """Remember a direction and its product with the Hessian."""
        self.pairs = [*self.pairs, (step, product)][-self.most :]

    def improving(self, solve: Solve) -> Solve:
        """The Σ at hand, made exact on the latest directions; for one vector `[P]`."""
        pairs = list(self.pairs)

        def corrected(vector: Tensor) -> Tensor:
            shares = []
            for s, y in reversed(pairs):
                share = (s @ vector) / (s @ y)
                vector = vector - share * y
                shares.append(share)
            vector = solve(vector)
            for (s, y), share in zip(pairs, reversed(shares), strict=True):
                vector = vector + (share - (y @ vector) / (s @ y)) * s
            return vector

        return corrected if pairs else solve
