"""H seen from the N·C outputs: Gram matrices of the features, at a cost cubic in the outputs and free of the weights.

With A = √τ LᵀJ, the rows of the Jacobian weighted by a root of W, Sylvester's identity gives
det(I + Λ⁻¹AᵀA) = det B, B = I + A Λ⁻¹ Aᵀ, and Woodbury's Σ = Λ⁻¹ − Λ⁻¹Aᵀ B⁻¹ A Λ⁻¹. W itself is never inverted. The
Grams are those of J, without W, so taking W elsewhere costs no pass over the data.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from linlap.curvature.base import Cost, Curvature, Factor, Restored, Sensitivities, Structure, noise_levels
from linlap.curvature.linalg import cholesky
from linlap.features import Linearised
from linlap.prior import Prior
from linlap.problem import Problem, recalled
from linlap.targets import Targets


class Dual(Structure):
    """The choice of Gram matrices."""

    name = "dual"

    def of(self, problem: Problem, outputs: Tensor) -> "DualCurvature":
        """Nothing is computed before the prior's groups are known."""
        return DualCurvature(problem, outputs, Grams(problem))

    def restored(self, tensors: dict[str, Tensor], linearised: Linearised, setting: Restored) -> "DualFactor":
        """From its triangle and the features."""
        targets = Targets(tensors["targets"], tensors["target_weights"])
        problem = recalled(linearised, setting.likelihood, targets, tensors, setting.memory)
        factor = DualFactor(
            DualCurvature(problem, tensors["outputs"], Grams(problem)), setting.prior, setting.noise_precision
        )
        factor.lower = tensors["upper"].mT
        return factor

    def cost(self, examples: int, outputs: int, weights: int, precisions: int) -> Cost:
        """The Grams, then ten evidence steps cubic in the outputs."""
        n = examples * outputs
        return Cost(n**2 * weights + 10 * (1 + precisions) * n**3, 8 * n * (n * (3 + precisions) + weights))


@dataclass
class Grams:
    """G_k = J_k T_k⁻¹ J_kᵀ `[K, NC, NC]` for the groups of one prior; made once for each prior structure."""

    problem: Problem
    _made_for: Prior | None = field(default=None, repr=False)
    _values: Tensor | None = field(default=None, repr=False)

    def of(self, prior: Prior) -> Tensor:
        """The Grams for that prior's groups and scales, whatever its precisions."""
        made = self._made_for
        if self._values is None or made is None or made.groups is not prior.groups or made.scale is not prior.scale:
            self._made_for, self._values = prior, self._make(prior)
        return self._values

    def _make(self, prior: Prior) -> Tensor:
        size, count = self.problem.network_outputs.numel(), len(prior.log_precision)
        grams = torch.zeros(count, size, size, dtype=torch.float64, device=prior.scale.device)
        scale = prior.groups.spread(prior.scale)
        members = [torch.nonzero(prior.learnt == k).squeeze(1) for k in range(count)]
        for here, one in blocks(self.problem):
            for there, other in blocks(self.problem):
                if there.start < here.start:
                    continue
                for k, own in enumerate(members):
                    left, right = (one, other) if count == 1 else (one[:, own], other[:, own])
                    product = (left / scale[own]) @ right.mT
                    grams[k, here, there] = product
                    grams[k, there, here] = product.mT
        return grams


def blocks(problem: Problem) -> Iterator[tuple[slice, Tensor]]:
    """J `[n·C, P]` in as few blocks of rows as a fifth of the memory allows."""
    c = problem.outputs
    for rows, jacobian in problem.sweeps.jacobians(problem.rows_at_once(0.2)):
        yield slice(rows.start * c, rows.stop * c), jacobian.double().flatten(0, 1)


@dataclass(frozen=True)
class DualCurvature(Curvature):
    """J and the root of W at `outputs`."""

    problem: Problem
    outputs: Tensor
    grams: Grams
    moves_freely = True

    def diagonal(self) -> Tensor:
        """Column sums of squares of LᵀJ for each noise level."""
        levels = noise_levels(self.problem)
        sums = torch.zeros(levels, self.problem.weights, dtype=torch.float64, device=self.outputs.device)
        for rows, jacobian in self.problem.sweeps.jacobians(self.problem.rows_at_once()):
            white = self.problem.likelihood.root_transpose(
                self.outputs[rows], self.problem.targets.rows(rows), jacobian.double()
            )
            for k in range(levels):
                sums[k] += white[:, k::levels].square().sum((0, 1))
        return sums

    def factor(self, prior: Prior, noise_precision: Tensor) -> "DualFactor":
        """Cholesky of B."""
        kernel = torch.einsum("k,kij->ij", (-prior.log_precision).exp(), self.grams.of(prior))
        return DualFactor.of(self, prior, noise_precision, kernel)

    def at(self, outputs: Tensor) -> "DualCurvature":
        """The Grams stay."""
        return replace(self, outputs=outputs)


class DualFactor(Factor):
    """B = I + A Λ⁻¹ Aᵀ = C Cᵀ."""

    def __init__(self, curvature: DualCurvature, prior: Prior, noise_precision: Tensor) -> None:
        self.curvature, self.problem, self.prior = curvature, curvature.problem, prior
        self.levels = noise_precision
        self.inner = self.lower = noise_precision.new_empty(0, 0)

    @staticmethod
    def of(curvature: DualCurvature, prior: Prior, noise_precision: Tensor, kernel: Tensor) -> "DualFactor":
        """From the kernel J Λ⁻¹ Jᵀ `[NC, NC]`."""
        made = DualFactor(curvature, prior, noise_precision)
        made.inner = made._both_sides(kernel)
        made.lower = cholesky(made.inner + torch.eye(len(made.inner), dtype=torch.float64, device=kernel.device))
        return made

    def tensors(self) -> dict[str, Tensor]:
        """The triangle, and J or else the inputs it comes from."""
        held = {"upper": self.lower.mT, "outputs": self.curvature.outputs}
        held |= {"targets": self.problem.targets.values, "target_weights": self.problem.targets.weight}
        return held | self.problem.features()

    def _rooted(self, columns: Tensor) -> Tensor:
        """√τ Lᵀ·columns `[R, m]` from `[NC, m]`."""
        problem, outputs = self.problem, self.curvature.outputs
        unflat = columns.reshape(*outputs.shape, -1)
        white = problem.likelihood.root_transpose(outputs, problem.targets, unflat)
        return (white * self.levels.sqrt().repeat(white.shape[1] // len(self.levels)).unsqueeze(-1)).flatten(0, 1)

    def _unrooted(self, rows: Tensor) -> Tensor:
        """L √τ·rows `[N, C, m]` from `[R, m]`."""
        problem, outputs = self.problem, self.curvature.outputs
        unflat = rows.reshape(len(outputs), -1, rows.shape[-1])
        scaled = unflat * self.levels.sqrt().repeat(unflat.shape[1] // len(self.levels)).unsqueeze(-1)
        return problem.likelihood.root(outputs, problem.targets, scaled)

    def _both_sides(self, gram: Tensor) -> Tensor:
        """A-weighted Gram `[R, R]`."""
        return self._rooted(self._rooted(gram).mT)

    @property
    def log_determinant(self) -> float:
        """Log det B."""
        return float(2 * self.lower.diagonal().log().sum())

    @cached_property
    def inverse(self) -> Tensor:
        """B⁻¹."""
        return torch.cholesky_inverse(self.lower)

    def sensitivities(self) -> Sensitivities:
        """With X = B⁻¹ and M_k = A_k Λ_k⁻¹ A_kᵀ: γ_k = tr XM_k, and every second derivative a trace of two of them."""
        x, grams = self.inverse, self.curvature.grams.of(self.prior)
        weight = (-self.prior.log_precision).exp()
        inner = (
            [self.inner] if len(grams) == 1 else [self._both_sides(w * g) for w, g in zip(weight, grams, strict=True)]
        )
        moved = [x @ m for m in inner]
        kept = torch.stack([m.trace() for m in moved])
        twice = torch.stack([torch.stack([(m * n.mT).sum() for n in moved]) for m in moved])
        level = torch.arange(len(x), device=x.device) % len(self.levels)
        one_hot = torch.nn.functional.one_hot(level, len(self.levels)).double()
        across = torch.stack([(m * x).sum(1) @ one_hot for m in moved])
        free = x.diagonal() @ one_hot
        corner = torch.diag(free) - one_hot.mT @ x.square() @ one_hot
        hessian = torch.cat([torch.cat([torch.diag(kept) - twice, across], 1), torch.cat([across.mT, corner], 1)])
        return Sensitivities(torch.cat([-kept, free - one_hot.sum(0)]), hessian)

    def effective_dimensions(self) -> Tensor:
        """(AᵀB⁻¹A)_jj / Λ_j."""
        total = torch.zeros_like(self.prior.precision)
        for rows, white in self._white_blocks():
            for others, other in self._white_blocks():
                total += (white * (self.inverse[rows, others] @ other)).sum(0)
        return total / self.prior.precision

    def _white_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """A `[r, P]` in blocks of rows."""
        likelihood, outputs = self.problem.likelihood, self.curvature.outputs
        for rows, jacobian in self.problem.sweeps.jacobians(self.problem.rows_at_once(0.1)):
            white = likelihood.root_transpose(outputs[rows], self.problem.targets.rows(rows), jacobian.double())
            white = white * self.levels.sqrt().repeat(white.shape[1] // len(self.levels)).unsqueeze(-1)
            each = white.shape[1]
            yield slice(rows.start * each, rows.stop * each), white.flatten(0, 1)

    def solve(self, vectors: Tensor) -> Tensor:
        """Woodbury."""
        columns = vectors.reshape(len(vectors), -1).double() / self.prior.precision.unsqueeze(1)
        rows = self._rooted(self.problem.sweeps.forward(columns))
        back = self.problem.sweeps.backward(self._unrooted(torch.cholesky_solve(rows, self.lower)))
        return (columns - back / self.prior.precision.unsqueeze(1)).reshape(vectors.shape)

    def whiten(self, rows: Tensor) -> Tensor:
        """Σ = ΣΛΣ + ΣAᵀAΣ, so R = [Λ½Σ rowsᵀ, AΣ rowsᵀ]ᵀ, and AΣ = B⁻¹AΛ⁻¹."""
        columns = rows.double().mT / self.prior.precision.unsqueeze(1)
        seen = torch.cholesky_solve(self._rooted(self.problem.sweeps.forward(columns)), self.lower)
        back = self.problem.sweeps.backward(self._unrooted(seen))
        solved = columns - back / self.prior.precision.unsqueeze(1)
        return torch.cat([solved * self.prior.precision.sqrt().unsqueeze(1), seen]).mT

    def sample(self, draws: int, generator: torch.Generator) -> Tensor:
        """A prior draw, corrected by what the data say of it: ε − Λ⁻¹Aᵀ B⁻¹ (Aε + η)."""
        p, device = len(self.prior.precision), self.prior.precision.device
        drawn = torch.randn(p, draws, dtype=torch.float64, device=generator.device, generator=generator).to(device)
        drawn = drawn / self.prior.precision.sqrt().unsqueeze(1)
        noise = torch.randn(len(self.lower), draws, dtype=torch.float64, device=generator.device, generator=generator)
        rows = self._rooted(self.problem.sweeps.forward(drawn)) + noise.to(device)
        back = self.problem.sweeps.backward(self._unrooted(torch.cholesky_solve(rows, self.lower)))
        return (drawn - back / self.prior.precision.unsqueeze(1)).mT
