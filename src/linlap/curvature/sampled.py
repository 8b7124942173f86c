"""The whole H at any size, through samples: nothing larger than a few vectors of weights is ever held.

A sample solves (H + Λ)ζ = Λ^½ε + JᵀW^½η, which makes it an exact draw from N(0, Σ). Block conjugate gradients
solve for all samples in the same passes, preconditioned by another structure, whose answers are closed form. What the
data determine is then counted in the space of functions, γ_g = E ζ_g·(Hζ)_g, and the log determinant is that of the
preconditioner, corrected by Lanczos quadrature.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linlap.curvature.base import Cost, Curvature, Factor, Restored, Sensitivities, Structure, noise_levels
from linlap.curvature.krylov import log_traces, solved
from linlap.curvature.rotated import Rotated, RotatedCurvature, RotatedFactor
from linlap.features import Linearised
from linlap.prior import Prior
from linlap.problem import Problem

RESIDUAL = 1e-3
"""Of the samples' systems: an order of magnitude below what sampling itself does to them."""

MOST_PASSES, LANCZOS_STEPS = 100, 20

ANCHORED = 0.5
"""E-folds up to which a log determinant is carried on along the derivative, which has less noise than a new one."""


@dataclass(frozen=True)
class Sampled(Structure):
    """The choice of samples.

    Args:
        base: the structure that preconditions.
        draws: how many samples; a variance made of K of them has a relative standard error of √(2/K).
        seed: of the samples.
    """

    base: Rotated
    draws: int = 64
    seed: int = 0
    name = "sampled"

    def seeded(self, seed: int) -> "Sampled":
        """The same with other samples."""
        return replace(self, seed=seed)

    def of(self, problem: Problem, outputs: Tensor) -> "SampledCurvature":
        """The preconditioner's passes; the samples' own come with the prior."""
        return SampledCurvature(problem, outputs, self.base.of(problem, outputs), self)

    def restored(self, tensors: dict[str, Tensor], linearised: Linearised, setting: Restored) -> "SampledFactor":  # noqa: ARG002
        """From the samples."""
        z, counted = tensors["samples"], Counted(tensors["kept"], tensors["gradient"], tensors["hessian"])
        value, error = tensors["log_determinant"].tolist()
        return SampledFactor(z, counted, setting.prior, value, error, mixed(z))

    def cost(self, examples: int, outputs: int, weights: int, precisions: int) -> Cost:
        """Twenty passes with three passes of the network for each sample, some ten times."""
        base = self.base.cost(examples, outputs, weights, precisions)
        passes = 10 * 20 * 6.0 * self.draws * examples * weights
        return Cost(base.operations + passes, base.bytes + 8 * 8 * self.draws * weights)


@dataclass(frozen=True)
class Counted:
    """γ of each weight `[P]`, and the log determinant's derivatives."""

    kept: Tensor
    gradient: Tensor
    hessian: Tensor


@dataclass
class Anchor:
    """Where the log determinant was last estimated by itself, and where it was carried since."""

    at: Tensor
    last: Tensor
    gradient: Tensor
    hessian: Tensor
    value: float
    error: float
    samples: Tensor


@dataclass(frozen=True)
class SampledCurvature(Curvature):
    """Products with H, and the structure that preconditions them."""

    problem: Problem
    outputs: Tensor
    base: RotatedCurvature
    choice: Sampled
    exact = False

    @property
    def note(self) -> str:
        """What the evidence is."""
        return f"evidence and error bars come from {self.choice.draws} samples: log_evidence_error is a standard error"

    def diagonal(self) -> Tensor:
        """Those of the preconditioner: its traces are exact."""
        return self.base.diagonal()

    def at(self, outputs: Tensor) -> "SampledCurvature":
        """Samples with W elsewhere."""
        return self.choice.of(self.problem, outputs)

    def factor(self, prior: Prior, noise_precision: Tensor) -> "SampledFactor":
        """Solve for the samples, from where they were under the prior before."""
        base = self.base.factor(prior, noise_precision)
        z = torch.cat([prior.log_precision, -noise_precision.log()])
        right = prior.precision.sqrt().unsqueeze(1) * self._noise + torch.einsum(
            "k,kpm->pm", noise_precision.sqrt(), self._data_noise
        )

        def apply(columns: Tensor) -> Tensor:
            return self._curved(columns, noise_precision) + prior.precision.unsqueeze(1) * columns

        start = self._anchors[-1].samples if self._anchors else base.solve(right)
        samples = solved(apply, base.solve, right, start, RESIDUAL, MOST_PASSES)
        products = right - prior.precision.unsqueeze(1) * samples
        counted, spread = self._counted(prior, noise_precision, samples, products, base)
        value, error = self._log_determinant(z, counted, spread, base, apply)
        self._anchors[-1].samples = samples
        return SampledFactor(samples, counted, prior, value, error, base.solve)

    @cached_property
    def _anchors(self) -> list[Anchor]:
        return []

    @cached_property
    def _noise(self) -> Tensor:
        """ε `[P, K]`."""
        return self._normal(self.problem.weights)

    @cached_property
    def _data_noise(self) -> Tensor:
        """JᵀS η of the outputs of each noise level `[levels, P, K]`, SSᵀ = W without the noise."""
        problem, levels = self.problem, noise_levels(self.problem)
        columns = self._normal(*problem.network_outputs.shape)
        rooted = problem.likelihood.mixed(self.outputs, problem.targets, columns)
        parts = []
        for level in range(levels):
            own = torch.zeros_like(rooted)
            own[:, level::levels] = rooted[:, level::levels]
            parts.append(problem.sweeps.backward(own))
        return torch.stack(parts)

    def _normal(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.choice.seed + len(shape))
        drawn = torch.randn(*shape, self.choice.draws, dtype=torch.float64, generator=generator)
        return drawn.to(self.outputs.device)

    def _curved(self, columns: Tensor, noise_precision: Tensor) -> Tensor:
        """H·columns `[P, m]`, a pass."""
        likelihood, targets = self.problem.likelihood, self.problem.targets

        def curve(rows: slice, pushed: Tensor) -> Tensor:
            outputs, own = self.outputs[rows], targets.rows(rows)
            curved = likelihood.root(outputs, own, likelihood.root_transpose(outputs, own, pushed))
            return curved * noise_precision.reshape(1, -1, 1)

        return self.problem.sweeps.there_and_back(columns, curve)[1]

    def _counted(
        self, prior: Prior, noise_precision: Tensor, samples: Tensor, products: Tensor, base: RotatedFactor
    ) -> tuple[Counted, Tensor]:
        """γ in the space of functions, and the log determinant's gradient by each sample `[K, m]`."""
        kept = samples * products
        by_prior = prior.sum(kept.mT)
        if len(noise_precision) == 1:
            by_noise = kept.sum(0).unsqueeze(1)
        else:
            pushed = self.problem.sweeps.forward(samples)
            rooted = self.problem.likelihood.root_transpose(self.outputs, self.problem.targets, pushed)
            by_noise = (rooted.square().sum(0) * noise_precision.unsqueeze(1)).mT
        gradients = -torch.cat([by_prior, by_noise], 1)
        return Counted(kept.mean(1), gradients.mean(0), base.sensitivities().hessian), gradients

    def _log_determinant(
        self, z: Tensor, counted: Counted, gradients: Tensor, base: RotatedFactor, apply: Any
    ) -> tuple[float, float]:
        """By itself where it is far from the last one, else along the derivative from there; with its standard error."""
        near = bool(self._anchors) and float((z - self._anchors[-1].at).abs().max()) <= ANCHORED
        if not near:
            value, error = self._by_itself(base, apply)
            self._anchors[:] = [Anchor(z, z, counted.gradient, counted.hessian, value, error, self._noise)]
            return value, error
        anchor = self._anchors[-1]
        step = z - anchor.last
        mean, bend = 0.5 * (anchor.gradient + counted.gradient), (anchor.hessian - counted.hessian) / 12
        anchor.value += float(mean @ step + step @ bend @ step)
        anchor.last, anchor.gradient, anchor.hessian = z, counted.gradient, counted.hessian
        drift = (gradients @ (z - anchor.at)).std() / math.sqrt(len(gradients))
        return anchor.value, math.hypot(anchor.error, float(drift))

    def _by_itself(self, base: RotatedFactor, apply: Any) -> tuple[float, float]:
        """Log det M + tr log M^−½(H + Λ)M^−½, with signs as probes in the preconditioner's own coordinates."""
        generator = torch.Generator().manual_seed(self.choice.seed)
        shape = (self.problem.weights, self.choice.draws)
        signs = 2.0 * torch.randint(0, 2, shape, generator=generator).double() - 1

        def whitened(columns: Tensor) -> Tensor:
            return base.whiten(apply(base.colour(columns.mT).mT).mT).mT

        traces = log_traces(whitened, signs.to(self.outputs.device), LANCZOS_STEPS)
        return base.log_determinant + float(traces.mean()), float(traces.std()) / math.sqrt(len(traces))


class SampledFactor(Factor):
    """Σ as the mean of ζζᵀ over the samples; `solve` is the preconditioner's, which the search for the weights goes by."""

    def __init__(
        self, samples: Tensor, counted: Counted, prior: Prior, log_determinant: float, error: float, solve: Any
    ) -> None:
        self.samples, self.counted, self.prior, self._solve = samples, counted, prior, solve
        self._log_determinant, self.log_determinant_error = log_determinant, error

    @property
    def log_determinant(self) -> float:
        """With an error of `log_determinant_error`."""
        return self._log_determinant

    def sensitivities(self) -> Sensitivities:
        """The gradient by the samples, the Hessian by the preconditioner."""
        return Sensitivities(self.counted.gradient, self.counted.hessian)

    def effective_dimensions(self) -> Tensor:
        """The mean of ζ_j (Hζ)_j."""
        return self.counted.kept

    def solve(self, vectors: Tensor) -> Tensor:
        """As the preconditioner has it, or, from a file, as the samples have it."""
        return self._solve(vectors)

    def whiten(self, rows: Tensor) -> Tensor:
        """What each sample makes of the rows."""
        return rows.double() @ self.samples / math.sqrt(self.samples.shape[1])

    def sample(self, draws: int, generator: torch.Generator) -> Tensor:
        """Random mixtures of the samples, with their covariance."""
        k = self.samples.shape[1]
        mixture = torch.randn(draws, k, dtype=torch.float64, device=generator.device, generator=generator)
        return mixture.to(self.samples.device) @ self.samples.mT / math.sqrt(k)

    def numbers(self, outputs: int) -> int:
        """What the samples make of the outputs."""
        return outputs * self.samples.shape[1]

    def variance_of(self, linearised: Linearised, inputs: Any) -> Tensor:
        """The samples pushed through the network."""
        return self._pushed(linearised, inputs).square().mean(-1)

    def covariance_of(self, linearised: Linearised, inputs: Any) -> Tensor:
        """The same between outputs."""
        pushed = self._pushed(linearised, inputs)
        return pushed @ pushed.mT / pushed.shape[-1]

    def _pushed(self, linearised: Linearised, inputs: Any) -> Tensor:
        return torch.stack([linearised.jvp(inputs, s)[1].double() for s in self.samples.mT], -1)

    def tensors(self) -> dict[str, Tensor]:
        """The samples, and what was counted with them."""
        counted, both = self.counted, [self.log_determinant, self.log_determinant_error]
        return {
            "samples": self.samples,
            "kept": counted.kept,
            "gradient": counted.gradient,
            "hessian": counted.hessian,
            "log_determinant": torch.tensor(both, dtype=torch.float64),
        }


def mixed(samples: Tensor) -> Any:
    """The solve that samples know of."""
    return lambda vectors: samples @ (samples.mT @ vectors) / samples.shape[1]
