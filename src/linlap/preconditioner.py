"""Preconditioners of the θ-step: Σ with W at the trained network, corrected for where W has grown since.

A trained network is confident about most of its training data, so W there is next to nothing; the linear model is less
so, and its W is larger by orders of magnitude in a few directions of a few examples. Adding those directions,
H + Λ + UᵀU with one row of U each, is a low-rank update, solved by Woodbury.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from linlap.curvature.linalg import cholesky
from linlap.problem import Problem

Solve = Callable[[Tensor], Tensor]
"""Σ·vectors, `[P]` or `[P, m]`."""

MOST_ROWS = 3000
"""Rows of the update at most; also a fifth of the weights."""


class Memory:
    """Products of recent conjugate-gradient directions, which correct a preconditioner (limited-memory BFGS)."""

    most = 12

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, step: Tensor, product: Tensor) -> None:
        """Remember a direction and its product with the Hessian."""
        self.pairs = [*self.pairs, (step, product)][-self.most :]

    def improving(self, solve: Solve) -> Solve:
        """The preconditioner, made exact on the remembered directions."""
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


def weightiest(problem: Problem, outputs: Tensor) -> tuple[Tensor, float]:
    """U `[m, P]`, the rows of √W J with the largest W, and the share of tr W in them. A pass."""
    likelihood, targets = problem.likelihood, problem.targets
    n, c = outputs.shape
    identity = torch.eye(c, dtype=torch.float64, device=outputs.device).expand(n, c, c)
    root = likelihood.root_transpose(outputs, targets, identity).mT
    sizes, turns = torch.linalg.eigh(root.mT @ root)
    most = min(MOST_ROWS, max(1, problem.weights // 3), sizes.numel())
    chosen = sizes.flatten().topk(most).indices.sort().values
    share = float(sizes.flatten()[chosen].sum() / sizes.sum())
    directions = (root @ turns).mT.flatten(0, 1)
    return problem.sweeps.rows(chosen // sizes.shape[1], directions[chosen]), share


def updated(precision: Tensor, rows: Tensor) -> Solve:
    """(Λ + UᵀU)⁻¹, by Woodbury."""
    answered = rows / precision
    lower = cholesky(torch.eye(len(rows), dtype=rows.dtype, device=rows.device) + answered @ rows.mT)

    def corrected(vectors: Tensor) -> Tensor:
        columns = vectors.reshape(len(vectors), -1)
        seen = torch.cholesky_solve(answered @ columns, lower)
        return vectors / precision.reshape(-1, *[1] * (vectors.ndim - 1)) - (answered.mT @ seen).reshape(vectors.shape)

    return corrected
