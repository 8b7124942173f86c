"""`ll.fit` against the oracle's optimum of the same objective, for every network of the registry."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import cases
import linlap as ll
import oracle
from fitted import close, fit, fit_case, flat, noise, precision, prior_of
from linlap import evidence
from linlap.alternate import AtOptimum
from linlap.curvature.base import Structure
from linlap.curvature.dense import Dense
from linlap.curvature.dual import Dual
from linlap.objective import Objective
from linlap.problem import Problem, pose
from linlap.weights import quadratic_start, zero_start

GAUSSIAN = cases.with_likelihood("gaussian")
ONE_EACH = cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image-classes")
MODELS = pytest.mark.parametrize("model", ["linear", "affine"])
BOTH = pytest.mark.parametrize("curvature", ["dense", "dual"])
STRUCTURES: dict[str, Structure] = {"dense": Dense(), "dual": Dual()}


def tolerance(case: cases.Case) -> float:
    """Of the weights and what depends on them: the search ends when F promises to fall by less than 1e-11 of itself."""
    return 1e-8 if case.likelihood == "gaussian" else 1e-5


def gradient(p: oracle.Problem, prior: oracle.Prior, z: Tensor, weights=oracle.theta_star) -> Tensor:
    """Of the oracle's F in z = (log λ, log σ²), the weights at their optimum."""
    z = z.clone().requires_grad_()
    lambdas, sigma = z[: prior.size].exp(), (z[prior.size :] / 2).exp().reshape(p.noise_shape)
    return torch.autograd.grad(oracle.profile(p, prior.precision(lambdas), sigma, weights), z)[0]


def hessian(p: oracle.Problem, prior: oracle.Prior, z: Tensor, weights=oracle.theta_star) -> Tensor:
    """By differences of the gradient."""
    steps = 1e-4 * torch.eye(len(z), dtype=z.dtype)
    return torch.stack([gradient(p, prior, z + h, weights) - gradient(p, prior, z - h, weights) for h in steps]) / 2e-4


def assert_optimum(
    post: ll.Posterior, p: oracle.Problem, prior: oracle.Prior, rtol: float, weights=oracle.theta_star
) -> None:
    """The oracle's Newton step from there promises no fall of F, and no common λ is better; all else follows."""
    assert post.status.converged
    lambdas = torch.stack([(precision(post) / prior.scale)[prior.group == g].mean() for g in range(prior.size)])
    Lambda, sigma = prior.precision(lambdas), noise(post, p)
    close(precision(post), Lambda, 1e-12)
    z = torch.cat([lambdas, sigma.flatten() ** 2]).log()
    slope, bend = gradient(p, prior, z, weights), hessian(p, prior, z, weights)
    free = bend.diagonal().abs() > 1e-6  # F is flat where a group is pruned
    step = torch.linalg.solve(bend[free][:, free], slope[free])
    F = oracle.profile(p, Lambda, sigma, weights)
    assert 0 <= slope[free] @ step / 2 <= 1e-11 * max(1, abs(F))
    assert step.abs().max() <= rtol
    assert slope[~free].abs().sum() <= 1e-6
    close(post.history[-1], F, 1e-10)
    for log_lambda in torch.arange(-7, 12, 4.0, dtype=torch.float64):
        assert oracle.profile(p, prior.precision(log_lambda.exp().expand(prior.size)), sigma, weights) + 1e-9 >= F
    assert_at(post, p, weights(p, Lambda, sigma), rtol)


def assert_at(post: ll.Posterior, p: oracle.Problem, theta: Tensor, rtol: float) -> None:
    """θ⋆, and the evidence, covariance and dimensions at Λ and σ."""
    Lambda, sigma = precision(post), noise(post, p)
    close(flat(post.weights), theta, rtol)
    close(post.log_evidence, oracle.log_evidence(p, theta, Lambda, sigma), 1e-8)
    close(post.factor.dense(), oracle.covariance(p, Lambda, sigma), 1e-8)
    groups = oracle.Prior(post.setting.prior.groups.membership, torch.ones_like(Lambda))
    close(list(post.effective_dimensions.values()), oracle.effective_dimensions(p, groups, Lambda, sigma), 1e-8)


# --- the optimum, for every case


@cases.every()
def test_single_precision(case):
    """From a cold start of its own the oracle ends at the same λ and σ."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="single")
    p = oracle.problem(net, X, Y, likelihood)
    best = oracle.optimum(p, prior_of("single", net, p))
    close(precision(post), best.precision, tolerance(case))
    close(noise(post, p), best.sigma, tolerance(case))
    close(post.history[-1], best.objective, 1e-11)
    assert_at(post, p, best.theta, tolerance(case))


@cases.every()
def test_single_precision_of_the_affine_model(case):
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="single", model="affine")
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    assert_optimum(post, p, prior_of("single", net, p), tolerance(case))


@cases.every()
def test_group_g_prior(case):
    """One λ, every tensor scaled by its mean curvature."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="curvature")
    p = oracle.problem(net, X, Y, likelihood)
    assert_optimum(post, p, prior_of("curvature", net, p), tolerance(case))


@cases.every(ONE_EACH)
def test_group_g_prior_of_the_affine_model(case):
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="curvature", model="affine")
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    assert_optimum(post, p, prior_of("curvature", net, p), tolerance(case))


@MODELS
@cases.every(cases.named("mlp", "mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "weight-norm", "tied"))
def test_a_precision_for_every_tensor(case, model):
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="tensor", model=model)
    p = oracle.problem(net, X, Y, likelihood, model=model)
    assert_optimum(post, p, prior_of("tensor", net, p), 1e-4)


@MODELS
@pytest.mark.parametrize("prior", ["single", "layer", "tensor", "curvature", "hyper"])
@cases.every(ONE_EACH)
def test_history_never_rises(case, prior, model):
    history = fit_case(case, prior=prior, model=model).history
    assert all(after <= before + 1e-9 for before, after in pairwise(history))


@MODELS
@cases.every()
def test_predictive_covariance_and_means(case, model):
    """JΣJᵀ within each example and between them; the mean is the network's or the linear model's."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X[:-3], Y[:-3]), likelihood, model=model)
    p = oracle.problem(net, X[:-3], Y[:-3], likelihood, model=model)
    f, J = oracle.jacobian(net, X[-3:])
    Sigma = oracle.covariance(p, precision(post), noise(post, p))
    pred, linear = post.predict(X[-3:]), post.predict(X[-3:], mean="linear")
    close(pred.variance, oracle.predictive_variance(J, Sigma), 1e-8)
    close(pred.cov, oracle.predictive_covariance(J, Sigma), 1e-8)
    close(pred.joint_cov, torch.einsum("iap,pq,jbq->iajb", J.flatten(1, -2), Sigma, J.flatten(1, -2)), 1e-8)
    with torch.no_grad():
        assert torch.equal(pred.mean, net(X[-3:]))
    theta = flat(post.weights)
    close(linear.mean, J @ theta if model == "linear" else f + J @ (theta - p.theta), 1e-10)


# --- dense and dual are the same


@pytest.mark.parametrize(("prior", "model"), [("single", "affine"), ("curvature", "linear")])
@cases.every()
def test_dense_equals_dual(case, prior, model):
    net, X, Y, likelihood = case.make()
    dense, dual = (fit(net, (X, Y), likelihood, prior=prior, model=model, curvature=c) for c in ("dense", "dual"))
    assert (dense.curvature, dual.curvature) == ("dense", "dual")
    close(dense.log_evidence, dual.log_evidence, 1e-8)
    close(dense.history[-1], dual.history[-1], 1e-8)
    close(dense.predict(X).variance, dual.predict(X).variance, 1e-8)


@cases.every()
def test_dense_factor_equals_dual_factor(case):
    """At one random setting: determinant, its derivatives, Σ, variances, dimensions."""
    problem, setting = random_setting(case, "tensor")
    curvatures = [s.of(problem, problem.network_outputs) for s in STRUCTURES.values()]
    dense, dual = (c.factor(setting.prior, setting.noise_precision) for c in curvatures)
    close(*(c.diagonal() for c in curvatures), 1e-12)
    close(dense.log_determinant, dual.log_determinant, 1e-8)
    close(dense.sensitivities().gradient, dual.sensitivities().gradient, 1e-8)
    close(dense.sensitivities().hessian, dual.sensitivities().hessian, 1e-8)
    close(dense.dense(), dual.dense(), 1e-8)
    close(dense.effective_dimensions(), dual.effective_dimensions(), 1e-8)
    J = ll.linearise(case.make()[0]).jacobian(case.make()[1])
    close(dense.variance(J), dual.variance(J), 1e-8)


def random_setting(case: cases.Case, structure: str, **options) -> tuple[Problem, evidence.Setting]:
    """The problem of a case and a random (Λ, σ) near the optimum's."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), options.pop("likelihood", likelihood), prior=structure, evidence_at="trained", **options)
    problem = pose(ll.linearise(net), (X, Y), post.likelihood, post.model, 2**30)
    generator = torch.Generator().manual_seed(0)
    setting = post.setting.at(torch.randn(post.setting.z.shape, generator=generator, dtype=torch.float64))
    return setting.pose(problem), setting


# --- the evidence and its derivatives at a given Λ


@BOTH
@MODELS
@cases.every(GAUSSIAN)
def test_evidence_equals_the_density_of_a_gaussian_process(case, model, curvature):
    """−F(θ⋆) = log N(y; c, σ²I + JΛ⁻¹Jᵀ) for a precision a tensor, to 1e-10."""
    problem, setting = random_setting(case, "tensor", model=model)
    factor = STRUCTURES[curvature].of(problem, problem.network_outputs).factor(setting.prior, setting.noise_precision)
    F = evidence.objective(
        problem, setting, factor, quadratic_start(Objective(problem, setting.prior.precision), factor)
    )
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood, model=model)
    close(-F, oracle.gp_log_density(p, setting.prior.precision, setting.noise.reshape(())), 1e-10)


@BOTH
@cases.every(cases.named("mlp-two-outputs", "deep-linear"))
def test_evidence_with_a_noise_for_each_output_equals_that_density(case, curvature):
    problem, setting = random_setting(case, "tensor", likelihood=ll.Gaussian(per_output=True))
    factor = STRUCTURES[curvature].of(problem, problem.network_outputs).factor(setting.prior, setting.noise_precision)
    F = evidence.objective(
        problem, setting, factor, quadratic_start(Objective(problem, setting.prior.precision), factor)
    )
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood, noise_shape=(2,))
    close(-F, oracle.gp_log_density(p, setting.prior.precision, setting.noise), 1e-10)


@BOTH
@cases.every([*ONE_EACH, cases.CASES["attention"]])
def test_derivatives_of_the_profile(case, curvature):
    """The gradient in (log λ, log σ²) by autograd; the Hessian, the weights' answer in it, by differences of that."""
    problem, setting = random_setting(case, "layer", likelihood=per_output(case))
    at = STRUCTURES[curvature].of(problem, problem.network_outputs)
    factor = at.factor(setting.prior, setting.noise_precision)
    centre = AtOptimum(1e-18)
    point = centre.settle(problem, setting, at, factor, zero_start(problem))
    responses = centre.responses(problem, setting, point)
    solve = centre.solver(problem, setting, at, factor, point)
    slope = evidence.slope(problem, setting, factor, point, responses, solve)

    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood, noise_shape=(2,))

    prior = oracle.Prior(setting.prior.learnt, torch.ones_like(p.theta))
    close(slope.gradient, gradient(p, prior, setting.z), 1e-7)
    exact = curvature == "dual" or likelihood == "gaussian"  # else by conjugate gradients, to a hundredth
    close(slope.profile, hessian(p, prior, setting.z), 1e-6 if exact else 1e-2)


def per_output(case: cases.Case):
    return ll.Gaussian(per_output=True) if case.likelihood == "gaussian" else case.likelihood


# --- other ways to the same optimum, and other optima


@MODELS
@cases.every()
def test_naive_method(case, model):
    """Loss, noise and curvature are those of the network itself, whatever the model."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="single", evidence_at="trained", model=model)
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    assert_optimum(post, p, prior_of("single", net, p), tolerance(case), weights=oracle.trained)
    close(flat(post.weights), p.theta, 0.0)
    close(post.log_evidence, -post.history[-1], 1e-12)


@BOTH
@pytest.mark.parametrize("prior", ["single", "curvature"])
@cases.every(cases.named("mlp-two-outputs", "deep-linear"))
def test_a_noise_for_each_output(case, prior, curvature):
    """The g-prior's scales are taken at the noise of the network's residuals."""
    net, X, Y, _ = case.make()
    post = fit(net, (X, Y), ll.Gaussian(per_output=True), prior=prior, curvature=curvature)
    p = oracle.problem(net, X, Y, "gaussian", noise_shape=(2,))
    residual = oracle.by_noise(p, (p.Y - p.f) ** 2).sqrt()
    assert_optimum(post, p, prior_of(prior, net, p, residual), 1e-8)
    close(post.predict(X).noise_std, oracle.network_noise(p, flat(post.weights), post.noise), 1e-10)
    close(post.predict(X, mean="linear").noise_std, post.noise, 1e-12)


@BOTH
@pytest.mark.parametrize("given", [0.3, (0.3, 0.7)], ids=["shared", "per-output"])
def test_given_noise(given, curvature):
    net, X, Y, _ = cases.CASES["mlp-two-outputs"].make()
    sigma = torch.tensor(given, dtype=torch.float64)
    post = fit(net, (X, Y), ll.Gaussian(noise=given if sigma.ndim == 0 else sigma), prior="single", curvature=curvature)
    p = oracle.problem(net, X, Y, "gaussian", noise_shape=tuple(sigma.shape))
    best = oracle.optimum(p, prior_of("single", net, p), sigma=sigma)
    close(precision(post), best.precision, 1e-8)
    assert_at(post, p, best.theta, 1e-8)
    close(noise(post, p), sigma, 1e-15)
    off = oracle.network_noise_off_optimum(p, best.precision, sigma)
    close(post.predict(X).noise_std, off.expand(2), 1e-8)
    close(post.predict(X, mean="linear").noise_std, sigma.expand(2), 1e-12)


def test_given_noise_must_fit_the_outputs():
    net, X, Y, _ = cases.CASES["mlp-two-outputs"].make()
    with pytest.raises(ll.errors.ShapeError, match="one number or one an output, but 3 came for 2 outputs: give one"):
        fit(net, (X, Y), ll.Gaussian(noise=torch.ones(3)))


@cases.every(GAUSSIAN)
def test_noise_about_the_network(case):
    """σ_f² = σ² + max(0, RSS_f − RSS_h)/N; about the linear model it is the evidence's own; naive has one noise."""
    net, X, Y, likelihood = case.make()
    post, p = fit(net, (X, Y), likelihood), oracle.problem(net, X, Y, likelihood)
    shape = Y.shape[1:]
    expected = oracle.network_noise(p, flat(post.weights), noise(post, p))
    close(post.predict(X).noise_std, expected.expand(shape), 1e-10)
    close(post.predict(X, mean="linear").noise_std, noise(post, p).expand(shape), 1e-10)
    naive = fit(net, (X, Y), likelihood, evidence_at="trained")
    close(naive.predict(X).noise_std, noise(naive, p).expand(shape), 1e-10)


@BOTH
@cases.every([*ONE_EACH, cases.CASES["mlp"]])
def test_weights_of_examples_count_like_repeated_rows(case, curvature):
    net, X, Y, likelihood = case.make()
    repeats = torch.arange(len(X)) % 4
    weighted = [(X[:7], Y[:7], repeats[:7]), (X[7:], Y[7:], repeats[7:].double())]
    post = fit(net, weighted, likelihood, prior="tensor", curvature=curvature)
    rows = X.repeat_interleave(repeats, 0), Y.repeat_interleave(repeats, 0)
    twin = fit(net, rows, likelihood, prior="tensor", curvature=curvature)
    close(post.log_evidence, twin.log_evidence, 1e-7)
    close(post.history[-1], twin.history[-1], 1e-9)
    close(post.predict(X).variance, twin.predict(X).variance, tolerance(case))
    close(flat(post.weights), flat(twin.weights), tolerance(case))
    if likelihood == "gaussian":
        close(post.noise, twin.noise, 1e-8)
        close(post.predict(X).noise_std, twin.predict(X).noise_std, 1e-8)


@BOTH
@pytest.mark.parametrize("mark", [-100, 255])
def test_ignored_places_count_for_nothing(mark, curvature):
    net, X, Y, _ = cases.CASES["image-classes"].make()
    hidden = torch.rand(Y.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    likelihood = ll.Categorical() if mark == -100 else ll.Categorical(ignore_index=mark)
    post = fit(net, (X, Y.masked_fill(hidden, mark)), likelihood, prior="single", curvature=curvature)

    def loss(o, y, _):
        y, seen = y[0], y[1].to(o.dtype)
        return -(o.log_softmax(0).gather(0, y[None])[0] * seen).sum()

    p = oracle.problem(net, X, Y, "categorical")
    p = replace(p, Y=torch.stack([Y, (~hidden).long()], 1), loss=loss)
    assert_optimum(post, p, prior_of("single", net, p), 1e-5)


@pytest.mark.parametrize("update", ["mackay", "sqrt-mackay"])
@pytest.mark.parametrize("prior", ["single", "curvature"])
@cases.every(ONE_EACH)
def test_fixed_points_reach_the_same_optimum(case, prior, update):
    newton = fit_case(case, prior=prior)
    other = fit_case(case, prior=prior, update=update, most_rounds=400)
    assert other.status.converged
    close(other.history[-1], newton.history[-1], 1e-8)
    close(precision(other).log(), precision(newton).log(), 1e-3)
    assert all(after <= before + 1e-9 for before, after in pairwise(other.history))


@BOTH
@cases.every(cases.named("mlp-classes", "bernoulli", "poisson", "image-classes"))
def test_curvature_refreshed_at_the_optimum(case, curvature):
    """θ⋆ and Λ⋆ are then optimal for H at θ⋆ itself, to the 1e-3 in log λ at which refreshing ends."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="single", hessian_at="optimum", curvature=curvature)
    p = oracle.problem(net, X, Y, likelihood)
    there, prior, z = replace(p, f=p.outputs(flat(post.weights))), prior_of("single", net, p), precision(post)[:1].log()
    assert abs(gradient(there, prior, z) / hessian(there, prior, z)) < 2e-3
    theta = oracle.theta_star(p, precision(post), noise(post, p))
    close(flat(post.weights), theta, 1e-6)
    close(post.log_evidence, oracle.log_evidence(p, theta, precision(post), noise(post, p)), 1e-8)


# --- what the evidence cannot see, and draws


@pytest.mark.parametrize("prior", ["curvature", "tensor", "single"])
def test_weights_without_effect_have_a_finite_precision_and_change_nothing(prior):
    class Idle(torch.nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net, self.idle = net, torch.nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))

        def forward(self, x):
            return self.net(x) + 0 * self.idle.sum()

    net, X, Y, likelihood = cases.CASES["mlp"].make()
    without, with_idle = (fit(n, (X, Y), likelihood, prior=prior) for n in (net, Idle(net)))
    close(with_idle.log_evidence, without.log_evidence, 1e-8)
    close(with_idle.predict(X).variance, without.predict(X).variance, 1e-8)
    assert all(0 < value < float("inf") for value in with_idle.prior.values())
    assert not flat(with_idle.weights)[:3].any()


@BOTH
@cases.every(cases.named("mlp-two-outputs", "mlp-classes", "image-classes"))
def test_draws_have_the_covariance(case, curvature):
    """Of 20 000 draws, whitened: the spectrum of a sample covariance lies within (1 ± √(P/n))² of one."""
    post = fit_case(case, curvature=curvature)
    draws = torch.cat([t.flatten(1) for t in post.sample(20_000).values()], 1) - flat(post.weights)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(post.factor.dense()), draws.mT, upper=False)
    ratio = (white.shape[0] / white.shape[1]) ** 0.5
    values = torch.linalg.eigvalsh(white @ white.mT / white.shape[1])
    assert values.min() > (1 - 1.2 * ratio) ** 2
    assert values.max() < (1 + 1.2 * ratio) ** 2
    assert white.mean(1).norm() < 1.3 * ratio
    assert torch.equal(flat(post.sample(3)), flat(post.sample(3)))
