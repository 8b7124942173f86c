"""`held_out=`: scales of the variance and of the noise, against a minimiser of the held-out negative log probability."""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor
from torch.distributions import MultivariateNormal

import cases
import linlap as ll
import oracle
from fitted import close, fit, fit_case
from linlap.calibration import calibrate, whitened
from linlap.data import Batch
from linlap.errors import DataError, DataWarning, ShapeError
from linlap.posterior import Calibration
from linlap.predictive import poisson_mixture

MEANS = pytest.mark.parametrize("mean", ["network", "linear"])
REGRESSIONS = cases.every(cases.named("mlp", "mlp-two-outputs", "image", "weight-norm"))
OTHERS = cases.every(cases.named("mlp-classes", "bernoulli", "poisson", "image-classes"))
N = 60

fitted = lru_cache(fit_case)


@lru_cache
def held_out(case: cases.Case) -> tuple[Tensor, Tensor]:
    """Targets drawn as if the epistemic variance were four times what it is, and the noise variance half."""
    _, X, _, likelihood = case.make()
    generator = torch.Generator().manual_seed(3)
    x = X[torch.arange(N) % len(X)]
    x = 1.3 * x + 0.5 * torch.randn(x.shape, dtype=x.dtype, generator=generator)
    predicted = fitted(case).predict(x)
    o = predicted.mean + 2 * (predicted.sample(1, seed=4)[0] - predicted.mean)
    if likelihood == "gaussian":
        return x, o + 0.5**0.5 * predicted.noise_std * torch.randn(o.shape, dtype=o.dtype, generator=generator)
    if likelihood == "poisson":
        return x, torch.poisson(o.exp(), generator=generator)
    if likelihood == "bernoulli":
        return x, torch.bernoulli(o.sigmoid(), generator=generator)
    p = o.movedim(1, -1).softmax(-1)
    return x, torch.multinomial(p.flatten(0, -2), 1, generator=generator).reshape(p.shape[:-1])


@lru_cache
def calibrated(case: cases.Case, **options) -> ll.Posterior:
    net, X, Y, likelihood = case.make()
    return fit(net, (X, Y), options.pop("likelihood", likelihood), held_out=held_out(case), **options)


def regression_loss(
    post: ll.Posterior, X: Tensor, Y: Tensor, mean: str
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """−Σ log N(y; mean, a cov + b σ²) and its gradient in (log a, log b)."""
    predicted = post.predict(X, mean=mean)
    m, cov, D = predicted.mean.flatten(1), predicted.cov, (predicted.noise_std.flatten() ** 2).diag()

    def loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
        z = torch.tensor(logs, requires_grad=True)
        value = -MultivariateNormal(m, z[0].exp() * cov + z[1].exp() * D).log_prob(Y.flatten(1)).sum()
        return value.item(), torch.autograd.grad(value, z)[0].numpy()

    return loss


def minimum(loss: Callable, start: list[float]) -> optimize.OptimizeResult:
    options = {"ftol": 0.0, "gtol": 1e-9}
    return optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(-9, 6)] * 2, options=options)


def other_loss(post: ll.Posterior, X: Tensor, Y: Tensor, mean: str) -> Callable[[float], float]:
    """−Σ log p(y) under `variance × e^z`, by the likelihood's own formula."""
    predicted = post.predict(X, mean=mean)

    def loss(z: float) -> float:
        f, v = predicted.mean, math.exp(z) * predicted.variance
        if post.likelihood.name == "poisson":
            return -float(poisson_mixture(Y, f, v).sum())
        p = oracle.probit(post.likelihood.name, f, v)
        if post.likelihood.name == "categorical":
            return -float(p.gather(1, Y.unsqueeze(1)).log().sum())
        return -float((Y * p.log() + (1 - Y) * (1 - p).log()).sum())

    return loss


# --- two scales: of the variance and of the noise


@MEANS
@REGRESSIONS
def test_both_scales_minimise_the_held_out_loss(case, mean):
    """Against BFGS from several starts: the loss to 1e-10, the scales to 1e-4."""
    plain, post, (X, Y) = fitted(case), calibrated(case), held_out(case)
    loss = regression_loss(plain, X, Y, mean)
    best = min((minimum(loss, [a, b]) for a in (-4, 0, 3) for b in (-1, 1)), key=lambda end: end.fun)
    own = np.log([post.calibration.variance[mean], post.calibration.noise[mean]])
    assert loss(own)[0] <= best.fun + 1e-10 * abs(best.fun)
    assert np.abs(own - best.x).max() < 1e-4


@MEANS
@REGRESSIONS
def test_a_scale_of_everything_has_a_closed_form(case, mean):
    """s = mean rᵀV⁻¹r / C is where the held-out loss of s·V is least, for one output mean r²/(v + σ²)."""
    post, (X, Y) = fitted(case), held_out(case)
    loss = regression_loss(post, X, Y, mean)
    best = optimize.minimize_scalar(lambda z: loss(np.array([z, z]))[0], bounds=(-5, 5), options={"xatol": 1e-10})
    predicted = post.predict(X, mean=mean)
    joint = whitened(post, [predicted], [Batch(X, Y)])
    scale = joint.scale(0.5, torch.ones(N, dtype=torch.float64))
    assert abs(math.log(scale) - best.x) < 1e-6
    if Y[0].numel() == 1:
        close(scale, ((Y - predicted.mean) ** 2 / (predicted.variance + predicted.noise_std**2)).mean(), 1e-12)


def test_each_output_may_have_its_own_noise():
    """The scale is common, the noise levels keep their ratio."""
    case = cases.CASES["mlp-two-outputs"]
    likelihood = ll.Gaussian(per_output=True)
    net, X, Y, _ = case.make()
    plain, post = (fit(net, (X, Y), likelihood, held_out=data) for data in (None, held_out(case)))
    best = minimum(regression_loss(plain, *held_out(case), "network"), [0, 0])
    own = np.log([post.calibration.variance["network"], post.calibration.noise["network"]])
    assert np.abs(own - best.x).max() < 1e-4
    close(post.predict(X).noise_std, plain.predict(X).noise_std * math.exp(own[1] / 2), 1e-12)


# --- one scale: of the variance


@MEANS
@OTHERS
def test_one_scale_minimises_the_held_out_loss(case, mean):
    """To 1e-9 of the loss, against a minimiser of its own within the same bounds."""
    plain, post, (X, Y) = fitted(case), calibrated(case), held_out(case)
    loss = other_loss(plain, X, Y, mean)
    best = min(
        (optimize.minimize_scalar(loss, bounds=(c - 2, c + 2), options={"xatol": 1e-9}) for c in range(-12, 14, 2)),
        key=lambda end: end.fun,
    )
    assert loss(math.log(post.calibration.variance[mean])) <= best.fun + 1e-9 * abs(best.fun)
    assert post.calibration.noise[mean] == 1


def test_the_scales_found_are_not_all_at_a_bound():
    """Or the tests above would pass with the bounds as the answer."""
    logs = [
        math.log(calibrated(cases.CASES[name]).calibration.variance[mean])
        for name in ("mlp-classes", "bernoulli", "poisson", "image-classes", "mlp", "image")
        for mean in ("network", "linear")
    ]
    assert sum(abs(z) < 5 for z in logs) >= 8


# --- what it changes, and what it leaves alone


@cases.every(cases.named("mlp", "mlp-two-outputs", "mlp-classes", "poisson"))
def test_the_evidence_and_its_own_are_left_alone(case):
    plain, post = fitted(case), calibrated(case)
    assert post.prior == plain.prior
    assert post.noise == plain.noise
    assert post.log_evidence == plain.log_evidence
    assert post.history == plain.history
    assert post.effective_dimensions == plain.effective_dimensions
    assert all(torch.equal(w, plain.weights[name]) for name, w in post.weights.items())
    assert torch.equal(post.predict(held_out(case)[0]).mean, plain.predict(held_out(case)[0]).mean)


@MEANS
@cases.every(cases.named("mlp-two-outputs", "mlp-classes"))
def test_everything_predicted_has_the_scales(case, mean):
    X, _ = held_out(case)
    plain, own = (post.predict(X, mean=mean) for post in (fitted(case), calibrated(case)))
    a, b = (getattr(calibrated(case).calibration, of)[mean] for of in ("variance", "noise"))
    close(own.variance, a * plain.variance, 1e-12)
    close(own.cov, a * plain.cov, 1e-12)
    close(own.joint_cov, a * plain.joint_cov, 1e-12)
    if own.noise_std is not None:
        close(own.noise_std, math.sqrt(b) * plain.noise_std, 1e-12)
        close(own.std, (a * plain.variance + b * plain.noise_std**2).sqrt(), 1e-12)


@MEANS
@cases.every(cases.named("mlp", "poisson", "mlp-classes"))
def test_ranks_are_taken_among_held_out_scores_whatever_the_scale(case, mean):
    own = calibrated(case).predict(held_out(case)[0], mean=mean)
    order = own.epistemic_score.argsort().argsort()
    close(own.reference, own.epistemic_score.sort().values, 1e-10)
    assert (own.epistemic_rank * N - order).abs().max() <= 1  # a score and its reference may round differently


def test_weights_of_held_out_examples_count_like_repeated_rows():
    for name in ("mlp-two-outputs", "mlp-classes"):
        X, Y = held_out(cases.CASES[name])
        count = torch.arange(N) % 3
        weighted = calibrate(fitted(cases.CASES[name]), [(X, Y, count.double())]).calibration
        rows = X.repeat_interleave(count, 0), Y.repeat_interleave(count, 0)
        repeated = calibrate(fitted(cases.CASES[name]), rows).calibration
        close(list(weighted.variance.values()), list(repeated.variance.values()), 1e-6)
        close(list(weighted.noise.values()), list(repeated.noise.values()), 1e-6)


def test_a_loader_is_as_good_as_its_tensors():
    case = cases.CASES["mlp"]
    X, Y = held_out(case)
    parts = list(zip(X.split(7), Y.split(7), strict=True))
    found, whole = calibrate(fitted(case), parts).calibration, calibrated(case).calibration
    close(list(found.variance.values()), list(whole.variance.values()), 1e-6)
    close(list(found.noise.values()), list(whole.noise.values()), 1e-6)


# --- what is said of it


def test_the_scales_are_reported_beside_the_evidences_own():
    post = calibrated(cases.CASES["mlp"])
    (line,) = [line for line in str(post).splitlines() if line.startswith("  held out")]
    for mean, words in (("network", "about the network"), ("linear", "about the linear model")):
        std = float(post.predict(held_out(cases.CASES["mlp"])[0], mean=mean).noise_std)
        assert f"epistemic variance × {post.calibration.variance[mean]:.3g}, noise {std:.4g} {words}" in line
    assert f"noise         {post.noise:.4g} about the linear model" in str(post)
    assert "held out" not in str(fitted(cases.CASES["mlp"]))
    assert "noise" not in str(calibrated(cases.CASES["mlp-classes"]))
    assert fitted(cases.CASES["mlp"]).calibration == Calibration()


@pytest.mark.parametrize("examples", [2, 29, 30])
def test_few_examples_are_warned_about(examples):
    case = cases.CASES["mlp"]
    few = tuple(t[:examples] for t in held_out(case))
    net, X, Y, likelihood = case.make()
    if examples >= 30:
        assert fit(net, (X, Y), likelihood, held_out=few).notes == fitted(case).notes
        return
    with pytest.warns(
        DataWarning, match=rf"held_out should hold at least 30 .* but it holds {examples}: pass more"
    ) as told:
        post = fit(net, (X, Y), likelihood, held_out=few)
    assert str(told[0].message) in post.notes
    assert str(told[0].message) in str(post)


def test_held_out_data_follow_the_rules_of_data():
    case = cases.CASES["mlp"]
    X, Y = held_out(case)
    with pytest.raises(DataError, match="the data must hold at least one example, but not one came"):
        calibrate(fitted(case), (X[:0], Y[:0]))
    with pytest.raises(DataError, match="inputs must be finite, but batch 0 holds 3 NaN"):
        calibrate(fitted(case), (torch.full((40, 3), float("nan")).double()[:1], Y[:1]))
    with pytest.raises(ShapeError, match=r"regression targets must have the outputs' shape \[n, 1\]"):
        calibrate(fitted(case), (X, Y.repeat(1, 2)))
