"""The conformance suite for a structure of the curvature of one's own.

    ll.testing.check_curvature(MyStructure())

runs every check of `CHECKS` on every one of `trials`: tiny problems of each likelihood, with shared and separate precisions
and noise levels, features held or streamed. Each check is a function that states its identity. Σ is `Factor.dense()`,
so a structure that approximates H is checked against itself; where it says `exact`, H is also compared with the sum
Σ_n J_nᵀ (∂²ℓ/∂o²) J_n taken from its definition.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from linlap import prior as priors
from linlap.curvature.base import Curvature, Factor, Restored, Structure, noise_levels
from linlap.errors import ConformanceError
from linlap.features import linearise
from linlap.likelihood import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from linlap.prior import Prior
from linlap.problem import Problem, pose
from linlap.targets import Targets

DRAWS = 3000
STEP = 1e-4
"""Of the central differences in log precisions and log noise variances."""

Check = Callable[["Trial"], None]


@dataclass(frozen=True)
class Trial:
    """A structure on a tiny problem, with the tolerance of its identities, relative to the largest number compared."""

    name: str
    structure: Structure
    problem: Problem
    prior: Prior
    noise_precision: Tensor
    tolerance: float

    @cached_property
    def curvature(self) -> Curvature:
        """H with W at the network's outputs."""
        return self.structure.of(self.problem, self.problem.network_outputs)

    @cached_property
    def factor(self) -> Factor:
        """The factor of H + Λ."""
        return self.curvature.factor(self.prior, self.noise_precision)

    @cached_property
    def sigma(self) -> Tensor:
        """Σ `[P, P]`, as the factor has it."""
        return self.factor.dense()

    @cached_property
    def jacobian(self) -> Tensor:
        """J of three examples `[3, C, P]`."""
        inputs = self.problem.batches[0].rows(0, 3).inputs
        return self.problem.linearised.jacobian(inputs).double()

    @property
    def z(self) -> Tensor:
        """Log precisions and log noise variances."""
        return torch.cat([self.prior.log_precision, -self.noise_precision.log()])

    def factor_at(self, z: Tensor) -> Factor:
        """The factor at other logs."""
        k = len(self.prior.log_precision)
        return self.curvature.factor(self.prior.at(z[:k]), (-z[k:]).exp())

    def hessians(self, outputs: Tensor) -> Tensor:
        """The S_k `[K, P, P]` from their definition: JᵀWJ with W = ∂²ℓ/∂o² at those outputs, under unit noise."""
        problem, c = self.problem, self.problem.outputs
        features = torch.cat([j for _, j in problem.sweeps.jacobians(64)]).double().flatten(0, 1)
        w = _output_hessian(problem.likelihood, outputs, problem.targets)
        level = torch.arange(len(w)) % c % noise_levels(problem)
        masks = [(level == k).double() for k in range(noise_levels(problem))]
        return torch.stack([(features.mT * mask) @ w @ features for mask in masks])

    def compare(self, what: str, got: Tensor | float, wanted: Tensor | float, slack: float = 1.0) -> None:
        """Both must agree to the tolerance, times the slack, of the largest number wanted."""
        got, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (got, wanted))
        if got.shape != wanted.shape:
            self.fail(what, f"it has shape {list(got.shape)} instead of {list(wanted.shape)}")
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        gap = float((got - wanted).abs().max()) if wanted.numel() else 0.0
        if not gap <= self.tolerance * slack * scale + 1e-14:
            self.fail(what, f"it is off by {gap:.3g}, on numbers up to {scale:.3g}")

    def require(self, what: str, holds: bool, came: str) -> None:  # noqa: FBT001 (what is required, not a switch)
        """A property that holds or does not."""
        if not holds:
            self.fail(what, came)

    def fail(self, what: str, came: str) -> None:
        """Say which identity is broken where, by how much, and where to read about it."""
        raise ConformanceError(
            f"a structure of the curvature must satisfy {what}, but for {self.structure.name!r} on the problem {self.name!r} "
            f"{came}: compare with the interface in linlap.curvature.base, and pass a wider tolerance= only for estimates"
        )


def _output_hessian(likelihood: Likelihood, outputs: Tensor, targets: Targets) -> Tensor:
    """∂²Σℓ/∂o² `[NC, NC]` by automatic differentiation, under unit noise."""
    posed = likelihood.at(torch.ones(1, dtype=torch.float64)) if isinstance(likelihood, Gaussian) else likelihood
    loss = torch.func.hessian(lambda o: posed.loss(o, targets).sum())
    return loss(outputs).reshape(outputs.numel(), outputs.numel())


# --- the checks


def log_determinant(trial: Trial) -> None:
    """Log det(I + Λ⁻¹H) = −log det Σ − log det Λ, a number that is not negative."""
    wanted = -float(torch.linalg.slogdet(trial.sigma)[1]) - float(trial.prior.precision.log().sum())
    trial.compare("log_determinant = −log det Σ − log det Λ", trial.factor.log_determinant, wanted)
    trial.require("log_determinant ≥ 0", trial.factor.log_determinant >= 0, f"it is {trial.factor.log_determinant:.3g}")


def gradient(trial: Trial) -> None:
    """sensitivities().gradient = ∂ log det(I + Λ⁻¹H)/∂(log λ, log σ²), by central differences."""
    trial.compare(
        "sensitivities().gradient = ∂ log_determinant/∂(log λ, log σ²)",
        trial.factor.sensitivities().gradient,
        _differences(trial, lambda factor: torch.tensor(factor.log_determinant, dtype=torch.float64)),
        slack=100,
    )


def hessian(trial: Trial) -> None:
    """sensitivities().hessian = ∂² log det(I + Λ⁻¹H)/∂(log λ, log σ²)², symmetric, by differences of the gradient."""
    got = trial.factor.sensitivities().hessian
    trial.compare("a symmetric sensitivities().hessian", got, got.mT)
    wanted = _differences(trial, lambda factor: factor.sensitivities().gradient)
    trial.compare("sensitivities().hessian = ∂ gradient/∂(log λ, log σ²)", got, wanted, slack=100)


def _differences(trial: Trial, function: Callable[[Factor], Tensor]) -> Tensor:
    """∂ function/∂z, one row for each z."""
    steps = STEP * torch.eye(len(trial.z), dtype=torch.float64)
    ends = [[function(trial.factor_at(trial.z + sign * step)) for sign in (1, -1)] for step in steps]
    return torch.stack([(up - down) / (2 * STEP) for up, down in ends])


def effective_dimensions(trial: Trial) -> None:
    """effective_dimensions() = diag(ΣH) = 1 − Λ_j Σ_jj; summed over a precision's weights they are −gradient."""
    got = trial.factor.effective_dimensions()
    trial.compare("effective_dimensions() = 1 − Λ_j Σ_jj", got, 1 - trial.prior.precision * trial.sigma.diagonal())
    k = len(trial.prior.log_precision)
    wanted = -trial.factor.sensitivities().gradient[:k]
    trial.compare("Σ_j effective_dimensions() = −gradient", trial.prior.sum(got), wanted)


def positive(trial: Trial) -> None:
    """Σ is symmetric, and 0 < Λ½ΣΛ½ ≤ I: H is positive semi-definite."""
    trial.compare("a symmetric Σ", trial.sigma, trial.sigma.mT)
    root = trial.prior.precision.sqrt()
    eigenvalues = torch.linalg.eigvalsh(root * (trial.sigma + trial.sigma.mT) / 2 * root.unsqueeze(1))
    inside = bool((eigenvalues > 0).all()) and float(eigenvalues.max()) <= 1 + trial.tolerance
    span = f"they reach from {eigenvalues.min():.3g} to 1 + {eigenvalues.max() - 1:.3g}"
    trial.require("eigenvalues of Λ½ΣΛ½ between 0 and 1", inside, span)


def solve(trial: Trial) -> None:
    """solve(V) = ΣV, for `[P]` and `[P, m]`."""
    vectors = _normal(trial, 4).mT
    trial.compare("solve(V) = ΣV", trial.factor.solve(vectors), trial.sigma @ vectors)
    trial.compare("solve(v) = Σv", trial.factor.solve(vectors[:, 0]), trial.sigma @ vectors[:, 0])


def whiten(trial: Trial) -> None:
    """R = whiten(A) has RRᵀ = AΣAᵀ."""
    rows = _normal(trial, 4)
    white = trial.factor.whiten(rows)
    trial.compare("whiten(A) whiten(A)ᵀ = AΣAᵀ", white @ white.mT, rows @ trial.sigma @ rows.mT)


def covariance(trial: Trial) -> None:
    """covariance(J) = J_n Σ J_nᵀ, variance(J) its diagonal, joint_covariance(J) = J Σ Jᵀ."""
    j, factor = trial.jacobian, trial.factor
    n, c, _ = j.shape
    flat = j.flatten(0, 1)
    joint = (flat @ trial.sigma @ flat.mT).reshape(n, c, n, c)
    own = torch.stack([joint[i, :, i] for i in range(n)])
    trial.compare("joint_covariance(J) = JΣJᵀ", factor.joint_covariance(j), joint)
    trial.compare("covariance(J) = J_nΣJ_nᵀ", factor.covariance(j), own)
    trial.compare("variance(J) = diag(J_nΣJ_nᵀ)", factor.variance(j), own.diagonal(dim1=1, dim2=2))


def sample(trial: Trial) -> None:
    """sample(n) has mean 0 and covariance Σ, within five standard errors, and is the same for the same generator."""
    drawn = trial.factor.sample(DRAWS, torch.Generator().manual_seed(0))
    few = [trial.factor.sample(3, torch.Generator().manual_seed(1)) for _ in range(2)]
    trial.require("the same draws from the same generator", torch.equal(*few), "they differ")
    trial.require("draws [n, P]", drawn.shape == (DRAWS, trial.problem.weights), f"they have shape {list(drawn.shape)}")
    std = trial.sigma.diagonal().sqrt()
    unit = drawn / std
    correlation = trial.sigma / std / std.unsqueeze(1)
    # the standard error of a product of unit normals of correlation r is √((1 + r²)/n)
    errors = (unit.mT @ unit / DRAWS - correlation).abs() / ((1 + correlation**2) / DRAWS).sqrt()
    mean = float(unit.mean(0).abs().max()) * DRAWS**0.5
    trial.require("draws of mean 0", mean < 5, f"one is off by {mean:.1f} standard errors")
    worst = float(errors.max())
    trial.require("draws of covariance Σ", worst < 5, f"an entry is off by {worst:.1f} standard errors")


def diagonal(trial: Trial) -> None:
    """diagonal() = diag(S_k) `[K, P]`, not negative; the exact one where the structure is exact."""
    got = trial.curvature.diagonal()
    wanted = trial.hessians(trial.problem.network_outputs).diagonal(dim1=1, dim2=2)
    trial.require("diagonal() [K, P]", got.shape == wanted.shape, f"it has shape {list(got.shape)}")
    trial.require("diagonal() ≥ 0", bool((got >= 0).all()), f"it goes down to {got.min():.3g}")
    if trial.curvature.exact:
        trial.compare("diagonal() = diag(Σ_n J_nᵀ W_n J_n)", got, wanted)


def moved(trial: Trial) -> None:
    """at(outputs) is H with W at those outputs, and leaves the old one as it was."""
    before = trial.factor.log_determinant
    outputs = 0.5 * trial.problem.network_outputs + 0.3
    there = trial.curvature.at(outputs).factor(trial.prior, trial.noise_precision)
    anew = trial.structure.of(trial.problem, outputs).factor(trial.prior, trial.noise_precision)
    trial.compare(
        "at(outputs) = Structure.of(problem, outputs), in log_determinant", there.log_determinant, anew.log_determinant
    )
    trial.compare("at(outputs) = Structure.of(problem, outputs), in Σ", there.dense(), anew.dense())
    after = trial.curvature.factor(trial.prior, trial.noise_precision).log_determinant
    trial.compare("a curvature that at(outputs) leaves alone", after, before)


def exact(trial: Trial) -> None:
    """Where `exact`: Σ⁻¹ − Λ = Σ_k τ_k Σ_n J_nᵀ W_n J_n, and log_determinant is its own."""
    if not trial.curvature.exact:
        return
    h = torch.einsum("k,kij->ij", trial.noise_precision, trial.hessians(trial.problem.network_outputs))
    posterior_precision = h + torch.diag(trial.prior.precision)
    wanted = torch.linalg.inv(posterior_precision)
    trial.compare("exact: Σ = (H + Λ)⁻¹", trial.sigma, wanted)
    log_det = float(torch.linalg.slogdet(posterior_precision)[1] - trial.prior.precision.log().sum())
    trial.compare("exact: log_determinant = log det(I + Λ⁻¹H)", trial.factor.log_determinant, log_det)


def round_trip(trial: Trial) -> None:
    """restored(tensors()) gives the same variances, solutions and determinant, bit for bit."""
    kept = {name: tensor.contiguous().clone() for name, tensor in trial.factor.tensors().items()}
    setting = Restored(trial.problem.likelihood, trial.prior, trial.noise_precision, trial.problem.memory)
    factor = trial.structure.restored(kept, trial.problem.linearised, setting)
    same = {
        "log_determinant": factor.log_determinant == trial.factor.log_determinant,
        "variance": torch.equal(factor.variance(trial.jacobian), trial.factor.variance(trial.jacobian)),
        "covariance": torch.equal(factor.covariance(trial.jacobian), trial.factor.covariance(trial.jacobian)),
        "sample": torch.equal(*(f.sample(3, torch.Generator().manual_seed(1)) for f in (factor, trial.factor))),
    }
    changed = [name for name, equal in same.items() if not equal]
    trial.require("restored(tensors()) bit for bit", not changed, f"{', '.join(changed)} changed")


def cost(trial: Trial) -> None:
    """cost(N, C, P, K) is positive and does not fall with N, and the structure has a name."""
    structure, p = trial.structure, trial.problem.weights
    small, large = (structure.cost(n, trial.problem.outputs, p, 1) for n in (10, 1000))
    positive = small.operations > 0 and small.bytes > 0
    grows = small.operations <= large.operations and small.bytes <= large.bytes
    trial.require("a positive cost that does not fall with N", positive and grows, f"it is {small}, then {large}")
    named = isinstance(structure.name, str) and structure.name != ""
    trial.require("a name", named, f"it is {structure.name!r}")


def _normal(trial: Trial, rows: int) -> Tensor:
    """Reproducible normal rows `[rows, P]`."""
    return torch.randn(rows, trial.problem.weights, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


CHECKS: tuple[Check, ...] = (
    cost, positive, exact, log_determinant, effective_dimensions, gradient, hessian,
    solve, whiten, covariance, sample, diagonal, moved, round_trip,
)  # fmt: skip
"""Every check, simplest first."""


# --- the problems

LARGE, SMALL = 2**28, 2**14
"""Memory with which the features of these problems are held, and with which they are streamed."""


def trials(structure: Structure, tolerance: float = 1e-8) -> Iterator[Trial]:
    """The structure on one problem of each kind."""
    yield _trial("gaussian", structure, Gaussian(), 1, "tensor", LARGE, tolerance)
    yield _trial(
        "gaussian, a noise for each output", structure, Gaussian(per_output=True), 2, "layer", LARGE, tolerance
    )
    yield _trial("categorical, streamed", structure, Categorical(), 3, "curvature", SMALL, tolerance)
    yield _trial("bernoulli", structure, Bernoulli(), 2, "single", LARGE, tolerance)
    yield _trial("poisson, streamed", structure, Poisson(), 1, "hyper", SMALL, tolerance)


def _trial(  # noqa: PLR0913 (a line of `trials` is read as a row of a table)
    name: str, structure: Structure, likelihood: Likelihood, outputs: int, prior: str, memory: int, tolerance: float
) -> Trial:
    """A small network with weights and data of fixed seeds, weighted examples among them."""
    generator = torch.Generator().manual_seed(outputs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    net = nn.Sequential(
        nn.utils.skip_init(nn.Linear, 2, 3, dtype=torch.float64),
        nn.Tanh(),
        nn.utils.skip_init(nn.Linear, 3, outputs, dtype=torch.float64),
    )
    for parameter in net.parameters():
        parameter.data.copy_(normal(*parameter.shape))
    x, signal = normal(14, 2), normal(14, outputs)
    targets = {"gaussian": signal, "categorical": signal.argmax(1), "bernoulli": (signal > 0).double()}
    y = targets.get(likelihood.name, signal.exp().round())
    weights = torch.linspace(0.5, 2, 14, dtype=torch.float64)
    problem = pose(linearise(net), [(x, y, weights)], likelihood, "linear", memory)
    diagonal = torch.ones(problem.weights, dtype=torch.float64) + problem.trained**2
    built = priors.build(prior, problem.linearised.network.layout, [], diagonal, problem.trained, 10.0)
    spread = torch.linspace(-0.5, 0.5, len(built.log_precision), dtype=torch.float64)
    noise_precision = torch.ones(1, dtype=torch.float64)
    if isinstance(likelihood, Gaussian):
        noise_precision = torch.tensor([4.0, 1.5], dtype=torch.float64)[: noise_levels(problem)]
    return Trial(name, structure, problem, built.at(built.log_precision + spread), noise_precision, tolerance)


def check_curvature(structure: Structure, tolerance: float = 1e-8, checks: Sequence[Check] = CHECKS) -> list[str]:
    """Run the checks on the structure, on every trial; return what was run, refuse what is broken.

    Args:
        structure: the structure, an instance.
        tolerance: relative accuracy of the identities: 1e-8 for what is computed, more for what is estimated.
        checks: some of `CHECKS`, to look into one of them.

    Raises:
        ConformanceError: names the identity, the problem and the size of the gap.

    Example:
        >>> import linlap as ll
        >>> from linlap.curvature.dense import Dense
        >>> len(ll.testing.check_curvature(Dense(), checks=[ll.testing.solve]))
        5
    """
    run = []
    for trial in trials(structure, tolerance):
        for check in checks:
            check(trial)
            run.append(f"{check.__name__} on {trial.name}")
    return run
