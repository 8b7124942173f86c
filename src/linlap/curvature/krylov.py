"""Linear systems and log determinants of which only products are known, several columns in one pass."""

from collections.abc import Callable

import torch
from torch import Tensor

Apply = Callable[[Tensor], Tensor]
"""A symmetric positive definite matrix times columns `[P, m]`."""

EXHAUSTED = 1e-10
"""Share of a column below which a Krylov space has no further direction."""


def solved(apply: Apply, precondition: Apply, right: Tensor, start: Tensor, tolerance: float, most: int) -> Tensor:
    """Columns X with A X = right, by conjugate gradients, until each residual is that share of its right side."""
    x = start
    residual = right - apply(x) if bool(x.any()) else right
    z = precondition(residual)
    direction, rz = z, (residual * z).sum(0)
    enough = tolerance**2 * (right * precondition(right)).sum(0)
    for _ in range(most):
        if bool((rz <= enough).all()):
            break
        product = apply(direction)
        bent = (direction * product).sum(0)
        length = torch.where(bent > 0, rz / bent.clamp(min=1e-300), 0)
        x, residual = x + length * direction, residual - length * product
        z = precondition(residual)
        previous, rz = rz, (residual * z).sum(0)
        direction = z + (rz / previous.clamp(min=1e-300)) * direction
    return x


def log_traces(apply: Apply, probes: Tensor, steps: int) -> Tensor:
    """Estimates `[m]` of tr log A, uᵀ log(A) u for probes u `[P, m]` with E uuᵀ = I, by Lanczos quadrature."""
    size = probes.norm(dim=0)
    previous, vector = torch.zeros_like(probes), probes / size
    diagonal, beside = [], [torch.zeros_like(size)]
    for _ in range(min(steps, len(probes))):
        moved = apply(vector) - beside[-1] * previous
        diagonal.append((moved * vector).sum(0))
        moved = moved - diagonal[-1] * vector
        length = moved.norm(dim=0)
        goes_on = length > EXHAUSTED * diagonal[-1]
        beside.append(torch.where(goes_on, length, 0))
        previous, vector = vector, torch.where(goes_on, moved / length.clamp(min=1e-300), vector)
    across = torch.stack(beside[1:-1], 1) if len(diagonal) > 1 else size.new_zeros(len(size), 0)
    matrices = torch.diag_embed(torch.stack(diagonal, 1)) + torch.diag_embed(across, 1) + torch.diag_embed(across, -1)
    nodes, vectors = torch.linalg.eigh(matrices)
    return size**2 * (vectors[:, 0].square() * nodes.clamp(min=1e-300).log()).sum(1)
