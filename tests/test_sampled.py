"""Curvature by samples: right on average, at the Monte-Carlo rate, with the error it states."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cases
import linlap as ll
from fitted import close, fit_case
from linlap.curvature.dense import DenseFactor
from linlap.curvature.kron import Kron
from linlap.curvature.krylov import log_traces, solved
from linlap.curvature.sampled import Sampled, SampledFactor
from linlap.problem import Streamed
from test_paper_algorithm import posed

EACH = cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image-classes", "batch-norm")
every_case = cases.every(EACH)


def both(case: cases.Case, draws: int, seed: int = 0) -> tuple[SampledFactor, DenseFactor]:
    problem, setting, _, factor = posed(case, "linear")
    sampled = Sampled(Kron(), draws, seed).of(problem, problem.network_outputs)
    assert isinstance(factor, DenseFactor)
    return sampled.factor(setting.prior, setting.noise_precision), factor


def off(factor: SampledFactor, exact: Tensor) -> float:
    """Distance of the samples' covariance from Σ, relative to what its expectation is: (tr Σ)² + tr Σ² over K."""
    own = factor.samples @ factor.samples.mT / factor.samples.shape[1]
    return float((own - exact).norm() / (exact.trace() ** 2 + exact.square().sum()).sqrt())


@every_case
def test_covariance_converges_at_the_monte_carlo_rate(case):
    """E‖Σ̂ − Σ‖² = ((tr Σ)² + tr Σ²)/K for exact draws: neither too far off nor, by luck of a bug, too near."""
    for draws in (64, 1024):
        errors = [off(sampled, exact.dense()) for sampled, exact in (both(case, draws, 10 * s) for s in range(3))]
        assert 0.7 < (sum(e**2 for e in errors) / 3) ** 0.5 * draws**0.5 < 1.4


@every_case
def test_every_direction_has_its_variance(case):
    """Along eigenvectors of Σ: each within five standard errors, largest and smallest alike."""
    sampled, exact = both(case, 2048)
    variances, axes = torch.linalg.eigh(exact.dense())
    own = (sampled.samples.mT @ axes).square().mean(0)
    assert float((own / variances - 1).abs().max()) < 5 * (2 / 2048) ** 0.5


@every_case
def test_effective_dimensions_and_log_determinant(case):
    """Within the errors they state."""
    sampled, exact = both(case, 2048)
    count = float(exact.effective_dimensions().sum())
    assert abs(float(sampled.effective_dimensions().sum()) - count) < 5 * (2 * count / 2048) ** 0.5
    close(sampled.sensitivities().gradient.sum(), -2 * sampled.effective_dimensions().sum(), 1e-9)
    allowed = 4 * sampled.log_determinant_error + 1e-3
    assert abs(sampled.log_determinant - exact.log_determinant) < allowed
    assert allowed < 0.3 * exact.log_determinant


def test_log_determinant_is_carried_along_its_derivative():
    """Between nearby precisions it changes as the exact one does, far more precisely than each is known."""
    problem, setting, dense, _ = posed(cases.CASES["batch-norm"], "linear")
    curvature = Sampled(Kron(), 512).of(problem, problem.network_outputs)
    change: dict[str, list[float]] = {"sampled": [], "exact": []}
    for step in (0.0, 0.2, 0.4):
        near = setting.at(setting.z + step)
        change["sampled"].append(curvature.factor(near.prior, near.noise_precision).log_determinant)
        change["exact"].append(dense.factor(near.prior, near.noise_precision).log_determinant)
    moved = {name: values[2] - values[0] for name, values in change.items()}
    assert moved["sampled"] == pytest.approx(moved["exact"], rel=0.05)


def test_several_columns_in_a_pass():
    """Through the network as with J in memory, and one pass for all of them."""
    problem, _, _, _ = posed(cases.CASES["image-classes"], "linear")
    through = replace(problem, sweeps=Streamed(problem.linearised, problem.batches, problem.outputs))
    columns = torch.randn(problem.weights, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (pushed, pulled), (pushed_through, pulled_through) = (
        p.sweeps.there_and_back(columns, lambda _, seen: 2 * seen) for p in (problem, through)
    )
    assert through.passes == 1
    close(pushed_through, pushed, 1e-12)
    close(pulled_through, pulled, 1e-12)
    close(pulled, 2 * problem.sweeps.backward(pushed), 1e-12)


@cases.every(cases.named("mlp-two-outputs", "mlp-classes", "layer-norm"))
def test_fit(case):
    """The precision is that of the exact curvature to the samples' error, and two fits are the same to the bit."""
    exact, sampled, again = (fit_case(case, curvature=c) for c in ("dense", Sampled(Kron(), 256), Sampled(Kron(), 256)))
    for group, precision in exact.prior.items():
        assert sampled.prior[group] == pytest.approx(precision, rel=0.3)
        assert sampled.prior[group] == again.prior[group]
    assert sampled.log_evidence_error > 0
    assert abs(sampled.log_evidence - exact.log_evidence) < 4 * sampled.log_evidence_error + 0.5
    X = case.make()[1]
    ratio = sampled.predict(X).epistemic_std / exact.predict(X).epistemic_std
    assert abs(float(ratio.mean()) - 1) < 0.15
    close(sampled.predict(X).epistemic_std, again.predict(X).epistemic_std, 0)


def test_by_name_and_from_a_file(tmp_path):
    case = cases.CASES["mlp-classes"]
    net, X = case.make()[:2]
    post = fit_case(case, curvature="sampled")
    assert post.curvature == "sampled"
    assert any("standard error" in note for note in post.notes)
    ll.save(post, tmp_path / "post.safetensors")
    again = ll.load(tmp_path / "post.safetensors", net)
    assert torch.equal(again.predict(X).cov, post.predict(X).cov)
    assert again.log_evidence_error == post.log_evidence_error
    assert torch.equal(fit_case(case, curvature="sampled").predict(X).cov, post.predict(X).cov)
    assert not torch.equal(fit_case(case, curvature="sampled", seed=1).predict(X).cov, post.predict(X).cov)
    drawn = torch.cat([w.flatten(1) for w in again.sample(20_000, seed=1).values()], 1)
    spread = post.factor.samples.square().mean(1).sum()
    close(drawn.var(0).sum(), spread, 0.05)


# --- what it is made of


def spd(size: int) -> Tensor:
    torch.manual_seed(0)
    root = torch.randn(size, size, dtype=torch.float64)
    return root @ root.mT / size + 0.1 * torch.eye(size, dtype=torch.float64)


def test_systems_of_several_columns():
    matrix = spd(40)
    right = torch.randn(40, 3, dtype=torch.float64)
    found = solved(lambda v: matrix @ v, lambda v: v / matrix.diagonal().unsqueeze(1), right, 0 * right, 1e-12, 200)
    close(matrix @ found, right, 1e-9)


def test_log_traces():
    """Exact for every probe once the steps exhaust the space; their mean is the log determinant for signs in all corners."""
    matrix = spd(6)
    values, axes = torch.linalg.eigh(matrix)
    probes = torch.randn(6, 5, dtype=torch.float64)
    log = axes * values.log() @ axes.mT
    close(log_traces(lambda v: matrix @ v, probes, 10), (probes * (log @ probes)).sum(0), 1e-8)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 6).mT
    close(log_traces(lambda v: matrix @ v, corners, 10).mean(), matrix.logdet(), 1e-8)


def test_log_traces_of_the_identity():
    """One step exhausts the space: log 1 = 0, not NaN."""
    probes = torch.ones(4, 2, dtype=torch.float64)
    close(log_traces(lambda v: v, probes, 3), torch.zeros(2, dtype=torch.float64), 1e-12)
