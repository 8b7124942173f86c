"""Cholesky factorisation that says what it had to do."""

import warnings

import torch
from torch import Tensor

from linlap.errors import NotPositiveDefiniteError, NumericsWarning

LADDER = (0.0, 1e-12, 1e-10, 1e-8)
"""Jitter tried in turn, relative to a unit diagonal."""


def cholesky(matrix: Tensor) -> Tensor:
    """Lower triangular L with LLᵀ = matrix, a matrix of unit diagonal or more; it is overwritten."""
    row = 0
    for jitter, previous in zip(LADDER, (0.0, *LADDER), strict=False):
        matrix.diagonal().add_(jitter - previous)
        factor, info = torch.linalg.cholesky_ex(matrix)
        row = int(info)
        if row == 0:
            if jitter:
                warnings.warn(
                    f"a curvature matrix was not positive definite to rounding; {jitter:.0e} was added to its unit "
                    "diagonal: use a float64 network for more digits",
                    NumericsWarning,
                    stacklevel=2,
                )
            return factor
    raise NotPositiveDefiniteError(
        f"a curvature matrix plus prior must be positive definite, but its Cholesky factorisation failed at row {row} "
        f"of {len(matrix)}, even with {LADDER[-1]:.0e} added to the diagonal: check the inputs' scale, or use float64"
    )
