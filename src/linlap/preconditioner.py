"""What the search for the weights goes by: a Σ at hand, corrected by what has been seen so far.

The factorised H has its W at the trained network, which is confident where the linear model is not yet. Products of
the Hessian where it is wanted come along with every pass over the data; a limited-memory BFGS update makes the Σ exact
on them at no further pass.
"""

from collections.abc import Callable

from torch import Tensor

from linlap.objective import Seen
from linlap.problem import Problem

Solve = Callable[[Tensor], Tensor]
"""Σ·vectors, `[P]` or `[P, m]`."""

MOST, FEWEST = 40, 3
"""Directions remembered, and where memory is short."""

SHARE = 0.1
"""Of the memory, for what is remembered."""


class Memory:
    """The latest directions with what was seen of them, as many as a share of the memory holds."""

    def __init__(self, problem: Problem) -> None:
        self.seen: list[Seen] = []
        each = 8 * (2 * problem.weights + problem.network_outputs.numel())
        self.most = max(FEWEST, min(MOST, int(SHARE * problem.memory / each)))

    def add(self, seen: Seen) -> Seen:
        """Remember a direction."""
        self.seen = [*self.seen, seen][-self.most :]
        return seen

    def improving(self, solve: Solve, precision: Tensor) -> Solve:
        """The Σ at hand, made exact on the latest directions; for one vector `[P]`."""
        seen = list(self.seen)

        def corrected(vector: Tensor) -> Tensor:
            shares = []
            for pair in reversed(seen):
                s, y = pair.step, pair.product + precision * pair.step
                share = (s @ vector) / (s @ y)
                vector = vector - share * y
                shares.append(share)
            vector = solve(vector)
            for pair, share in zip(seen, reversed(shares), strict=True):
                s, y = pair.step, pair.product + precision * pair.step
                vector = vector + (share - (y @ vector) / (s @ y)) * s
            return vector

        return corrected if seen else solve
