"""What every structure of the curvature H = Σ_k τ_k S_k offers; the identities are the contract.

A `Structure` is the choice ("dense"), `Structure.of(problem, outputs)` is H with W taken at `outputs`, and
`Curvature.factor(prior, noise_precision)` a `Factor` of H + Λ. S_k belongs to one learnt noise level τ_k = 1/σ_k²;
without a learnt noise there is one S with τ = 1.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linlap.features import Linearised
from linlap.likelihood import Likelihood
from linlap.prior import Prior
from linlap.problem import Problem


@dataclass(frozen=True)
class Sensitivities:
    """Derivatives of log det(I + Λ⁻¹H) in z = (log λ_1 … log λ_K, log σ_1² …).

    The gradient `[m]` is −γ: minus the effective dimensions of each learnt precision and of each noise level.
    """

    gradient: Tensor
    hessian: Tensor


class Factor(ABC):
    """A factorisation of H + Λ; Σ = (H + Λ)⁻¹."""

    prior: Prior

    log_determinant_error: float = 0.0
    """Its standard error, where it is estimated."""

    @property
    @abstractmethod
    def log_determinant(self) -> float:
        """Log det(I + Λ⁻¹H)."""

    @abstractmethod
    def sensitivities(self) -> Sensitivities:
        """Its derivatives in the log precisions and log noise variances."""

    @abstractmethod
    def effective_dimensions(self) -> Tensor:
        """(ΣH)_jj of each weight `[P]`."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """Σ·vectors, `[P]` or `[P, m]`."""

    @abstractmethod
    def whiten(self, rows: Tensor) -> Tensor:
        """R `[m, r]` with R Rᵀ = rows Σ rowsᵀ, from rows `[m, P]`: variances made of it are never negative."""

    @abstractmethod
    def sample(self, draws: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, Σ) `[draws, P]`."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What `Structure.restored` needs to make this factor again, bit for bit."""

    def covariance(self, jacobian: Tensor) -> Tensor:
        """J Σ Jᵀ of each example by itself `[n, C, C]`, from `[n, C, P]`."""
        white = self.whiten(jacobian.flatten(0, 1)).unflatten(0, jacobian.shape[:2])
        return white @ white.mT

    def variance(self, jacobian: Tensor) -> Tensor:
        """The diagonal of J Σ Jᵀ `[n, C]`."""
        return self.whiten(jacobian.flatten(0, 1)).square().sum(-1).unflatten(0, jacobian.shape[:2])

    def joint_covariance(self, jacobian: Tensor) -> Tensor:
        """J Σ Jᵀ between all examples `[n, C, n, C]`."""
        n, c, _ = jacobian.shape
        white = self.whiten(jacobian.flatten(0, 1))
        return (white @ white.mT).reshape(n, c, n, c)

    def numbers(self, outputs: int) -> int:
        """Numbers that predicting for one example needs at once: a row of the Jacobian for each output."""
        return outputs * len(self.prior.precision)

    def variance_of(self, linearised: Linearised, inputs: Any) -> Tensor:
        """The variance `[n, C]` of the outputs at some inputs."""
        return self.variance(linearised.jacobian(inputs))

    def covariance_of(self, linearised: Linearised, inputs: Any) -> Tensor:
        """The covariance `[n, C, C]` of the outputs at some inputs."""
        return self.covariance(linearised.jacobian(inputs))

    def dense(self) -> Tensor:
        """Σ `[P, P]`; for tests and small networks."""
        return self.solve(torch.eye(len(self.effective_dimensions()), dtype=torch.float64))


class Curvature(ABC):
    """H with W taken at fixed outputs."""

    exact = True
    """Is Σ·vectors that of the whole generalised Gauss-Newton matrix?"""

    note = ""
    """What is to be known of the evidence."""

    moves_freely = False
    """Does taking W at other outputs cost no pass over the data?"""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Diagonals of the S_k `[K, P]`, noise left out."""

    @abstractmethod
    def factor(self, prior: Prior, noise_precision: Tensor) -> Factor:
        """Factorise Σ_k τ_k S_k + Λ, with τ = `noise_precision` `[K]`."""

    @abstractmethod
    def at(self, outputs: Tensor) -> "Curvature":
        """H with W taken at other outputs `[N, C]` instead."""


@dataclass(frozen=True)
class Restored:
    """What a saved factor belongs to."""

    likelihood: Likelihood
    prior: Prior
    noise_precision: Tensor
    memory: int


@dataclass(frozen=True)
class Cost:
    """What a structure would take: floating-point operations and peak bytes."""

    operations: float
    bytes: float


class Structure(ABC):
    """The choice of a structure."""

    name: str

    def seeded(self, seed: int) -> "Structure":  # noqa: ARG002 (only where something is random)
        """The same choice with another seed of what is random in it."""
        return self

    @abstractmethod
    def of(self, problem: Problem, outputs: Tensor) -> Curvature:
        """H of the problem, W taken at `outputs` `[N, C]`."""

    @abstractmethod
    def restored(self, tensors: dict[str, Tensor], linearised: Linearised, setting: Restored) -> Factor:
        """The factor whose `tensors` were saved."""

    @abstractmethod
    def cost(self, examples: int, outputs: int, weights: int, precisions: int) -> Cost:
        """An estimate for N, C, P and K, before anything runs."""


def noise_levels(problem: Problem) -> int:
    """K of the sum H = Σ_k τ_k S_k: learnt noise levels, or one without noise."""
    return max(1, problem.likelihood.noise_blocks(problem.outputs))
