"""The whole H, P × P: exact, for up to some ten thousand weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linlap.curvature.base import Cost, Curvature, Factor, Restored, Sensitivities, Structure, noise_levels
from linlap.curvature.linalg import cholesky
from linlap.features import Linearised
from linlap.prior import Prior
from linlap.problem import Problem

MATRICES = 5
"""Matrices of size P × P that are alive together while the evidence is searched for."""

PANELS = 8
"""Column panels of the symmetric product: 1/2 + 1/16 of the full product's work is done."""


class Dense(Structure):
    """The choice of the whole matrix."""

    name = "dense"

    def of(self, problem: Problem, outputs: Tensor) -> "DenseCurvature":
        """Σ_n (LᵀJ)_nᵀ(LᵀJ)_n, products in the network's precision within a chunk of rows, summed in float64."""
        p, levels = problem.weights, noise_levels(problem)
        sums = torch.zeros(levels, p, p, dtype=torch.float64, device=outputs.device)

        def roots(rows: slice) -> Tensor:
            """Lᵀ `[n, R, C]`."""
            identity = torch.eye(problem.outputs, dtype=torch.float64, device=outputs.device)
            columns = identity.expand(rows.stop - rows.start, -1, -1)
            return problem.likelihood.root_transpose(outputs[rows], problem.targets.rows(rows), columns)

        pile = Pile(sums)
        for _, white in problem.sweeps.pulled(roots):
            pile.add(white)
        pile.clear()
        for k in range(levels):
            mirror(sums[k])
        return DenseCurvature(problem, sums)

    def restored(self, tensors: dict[str, Tensor], linearised: Linearised, setting: Restored) -> "DenseFactor":  # noqa: ARG002
        """From its triangle."""
        return DenseFactor(tensors["upper"].mT, tensors["scale"], setting.prior, setting.noise_precision)

    def cost(self, examples: int, outputs: int, weights: int, precisions: int) -> Cost:  # noqa: ARG002
        """N C P² to build; ten factorisations with inverse."""
        return Cost(examples * outputs * weights**2 + 10 * weights**3, MATRICES * 8 * weights**2)


class Pile:
    """Rows of √W J are piled up until a product of them is worth reading and writing the whole sum."""

    def __init__(self, sums: Tensor) -> None:
        self.sums, self.parts, self.height = sums, [], 0

    def add(self, white: Tensor) -> None:
        """Put `[n, R, P]` on the pile."""
        self.parts.append(white)
        self.height += white.shape[0] * white.shape[1]
        if self.height >= len(self.sums[0]) // 4:
            self.clear()

    def clear(self) -> None:
        """Add the products of what lies there: row r of an example belongs to noise level r mod K."""
        if self.parts:
            white, levels = torch.cat(self.parts), len(self.sums)
            self.parts, self.height = [], 0
            for k, total in enumerate(self.sums):
                add_gram(total, (white if levels == 1 else white[:, k::levels]).reshape(-1, white.shape[2]))


def add_gram(sums: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ·rows to the upper triangle of `sums`, panel by panel."""
    size = len(sums)
    step = -(-size // (PANELS if size >= 64 * PANELS else 1))
    for start in range(0, size, step):
        stop = min(start + step, size)
        sums[start:stop, start:] += rows[:, start:stop].mT @ rows[:, start:]


def mirror(sums: Tensor) -> None:
    """Copy the upper triangle to the lower, in panels to save memory."""
    size, step = len(sums), 2048
    for start in range(0, size, step):
        stop = min(start + step, size)
        block = sums[start:stop, start:stop]
        block.copy_(block.triu() + block.triu(1).mT)
        sums[stop:, start:stop] = sums[start:stop, stop:].mT


@dataclass(frozen=True)
class DenseCurvature(Curvature):
    """S_k `[K, P, P]`."""

    problem: Problem
    sums: Tensor

    def diagonal(self) -> Tensor:
        """Diagonals of the S_k."""
        return self.sums.diagonal(dim1=1, dim2=2)

    def factor(self, prior: Prior, noise_precision: Tensor) -> "DenseFactor":
        """Cholesky of H + Λ scaled to a unit diagonal."""
        matrix = torch.einsum("k,kij->ij", noise_precision, self.sums)
        matrix.diagonal().add_(prior.precision)
        scale = matrix.diagonal().rsqrt()
        matrix.mul_(scale).mul_(scale.unsqueeze(1))
        return DenseFactor(cholesky(matrix), scale, prior, noise_precision, self.sums)

    def at(self, outputs: Tensor) -> "DenseCurvature":
        """Build it anew."""
        return Dense().of(self.problem, outputs)


class DenseFactor(Factor):
    """D⁻½ (H + Λ) D⁻½ = L Lᵀ with D the diagonal of H + Λ."""

    def __init__(
        self, lower: Tensor, scale: Tensor, prior: Prior, noise_precision: Tensor, sums: Tensor | None = None
    ) -> None:
        self.lower, self.scale, self.prior, self.noise_precision, self.sums = lower, scale, prior, noise_precision, sums
        self._variances: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The factor itself: its transpose, which is how it lies in memory, so that later sums are taken in one order."""
        return {"upper": self.lower.mT, "scale": self.scale}

    @property
    def log_determinant(self) -> float:
        """Log det(H + Λ) − log det Λ."""
        return float(2 * (self.lower.diagonal().log() - self.scale.log()).sum() - self.prior.precision.log().sum())

    def covariance_matrix(self) -> Tensor:
        """Σ; too large to be kept, unlike its diagonal."""
        inverse = torch.cholesky_inverse(self.lower)
        inverse.mul_(self.scale).mul_(self.scale.unsqueeze(1))
        self._variances = inverse.diagonal().clone()
        return inverse

    def sensitivities(self) -> Sensitivities:
        """With a_k = tr(ΣΛ_k) and A_kl = tr(ΣΛ_kΣΛ_l), everything for one noise level; products ΣH_k for several."""
        sigma, prior = self.covariance_matrix(), self.prior
        shrunk = prior.precision * sigma.diagonal()
        a, kept = prior.sum(shrunk), prior.sum(1 - shrunk)
        squared = _block_squares(sigma, prior)
        if self.sums is None or len(self.sums) == 1:
            across = (a - squared.sum(1)).unsqueeze(1)
            corner = across.sum().reshape(1, 1)
            noise_gradient = -kept.sum().reshape(1)
        else:
            moved = [sigma @ (tau * s) for tau, s in zip(self.noise_precision, self.sums, strict=True)]
            across = torch.stack([prior.sum(prior.precision * (m * sigma).sum(1)) for m in moved], 1)
            noise_gradient = -torch.stack([m.trace() for m in moved])
            corner = -torch.stack([torch.stack([(m * n.mT).sum() for n in moved]) for m in moved])
            corner.diagonal().sub_(noise_gradient)
        hessian = torch.cat([torch.cat([torch.diag(a) - squared, across], 1), torch.cat([across.mT, corner], 1)])
        return Sensitivities(torch.cat([-kept, noise_gradient]), hessian)

    def effective_dimensions(self) -> Tensor:
        """1 − Λ_j Σ_jj."""
        variances = self.covariance_matrix().diagonal() if self._variances is None else self._variances
        return 1 - self.prior.precision * variances

    def solve(self, vectors: Tensor) -> Tensor:
        """Two triangular solves, for one column six times as fast as `cholesky_solve`."""
        columns = vectors.reshape(len(vectors), -1).double() * self.scale.unsqueeze(1)
        half = torch.linalg.solve_triangular(self.lower, columns, upper=False)
        solved = torch.linalg.solve_triangular(self.lower.mT, half, upper=True) * self.scale.unsqueeze(1)
        return solved.reshape(vectors.shape)

    def whiten(self, rows: Tensor) -> Tensor:
        """(L⁻¹ D⁻½ rowsᵀ)ᵀ."""
        return torch.linalg.solve_triangular(self.lower, (rows.double() * self.scale).mT, upper=False).mT

    def sample(self, draws: int, generator: torch.Generator) -> Tensor:
        """D⁻½ L⁻ᵀ ε."""
        noise = torch.randn(len(self.scale), draws, dtype=torch.float64, device=generator.device, generator=generator)
        solved = torch.linalg.solve_triangular(self.lower.mT, noise.to(self.lower.device), upper=True)
        return (self.scale.unsqueeze(1) * solved).mT


def _block_squares(sigma: Tensor, prior: Prior) -> Tensor:
    """A_kl = tr(ΣΛ_kΣΛ_l) `[K, K]`, some rows of Σ at a time."""
    total = torch.zeros(len(prior.log_precision), len(prior.log_precision), dtype=torch.float64, device=sigma.device)
    for start in range(0, len(sigma), 1024):
        rows = slice(start, start + 1024)
        by_column = prior.sum(sigma[rows].square() * prior.precision) * prior.precision[rows].unsqueeze(1)
        total.index_add_(0, prior.learnt[rows], by_column)
    return total
