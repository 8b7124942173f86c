"""The oracle against closed forms, finite differences, integrals and scikit-learn; what cases promise."""

import itertools
import math

import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from sklearn.linear_model import BayesianRidge
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close

import cases
import oracle

GAUSSIAN = cases.with_likelihood("gaussian")
ONE_EACH = cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image-classes")
UNIT = torch.ones((), dtype=torch.float64)
MODELS = pytest.mark.parametrize("model", ["linear", "affine"])


def close(actual, expected, rtol=1e-10):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    assert_close(actual, expected, rtol=rtol, atol=rtol)


def by_module(name):
    return name.rpartition(".")[0]


def setting(case, key=by_module, **options):
    """The problem of a case, a prior with one group for each key, and a random (log λ, log σ²)."""
    net, X, Y, likelihood = case.make()
    p, prior = oracle.problem(net, X, Y, likelihood, **options), oracle.grouped(net, key)
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(p.theta.shape, generator=generator, dtype=torch.float64) + 0.5
    z = torch.randn(prior.size + math.prod(p.noise_shape), generator=generator, dtype=torch.float64)
    return p, oracle.Prior(prior.group, scale), z


def unpack(p, prior, z):
    return prior.precision(z[: prior.size].exp()), (z[prior.size :] / 2).exp().reshape(p.noise_shape)


# --- the parts


@cases.every()
def test_jacobian_is_the_derivative_of_the_network(case):
    net, X, *_ = case.make()
    _, J = oracle.jacobian(net, X)
    theta = parameters_to_vector(net.parameters()).detach()
    direction = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0), dtype=theta.dtype)

    def f(t):
        vector_to_parameters(theta + t * direction, net.parameters())
        return net(X)

    h = 1e-6
    close(J @ direction, (f(h) - f(-h)) / (2 * h), rtol=1e-7)


@cases.every(ONE_EACH)
def test_output_hessian_has_its_closed_form(case):
    p, *_ = setting(case)
    sigma = torch.tensor([0.5, 2.0], dtype=torch.float64)
    o = p.f.flatten(1)
    rate = {
        oracle.gaussian: lambda: (sigma**-2).expand_as(o),
        oracle.bernoulli: lambda: o.sigmoid() * (1 - o.sigmoid()),
        oracle.poisson: o.exp,
    }
    if p.loss is oracle.categorical:  # diag(p) − ppᵀ in each pixel
        q = p.f.softmax(1).reshape(len(o), 3, -1).mT
        blocks = q.diag_embed() - q[..., None] * q[..., None, :]
        same_pixel = torch.eye(q.shape[1], dtype=q.dtype)
        W = torch.einsum("nsab,st->nasbt", blocks, same_pixel).reshape(len(o), o.shape[1], o.shape[1])
    else:
        W = rate[p.loss]().diag_embed()
    close(p.W(p.f, sigma), W)


@cases.every(ONE_EACH)
def test_loss_is_torch_own_negative_log_likelihood(case):
    p, *_ = setting(case)
    o = p.f.movedim(1, -1) if p.loss is oracle.categorical else p.f
    density = {
        oracle.gaussian: lambda: torch.distributions.Normal(o, 0.7 * UNIT),
        oracle.categorical: lambda: torch.distributions.Categorical(logits=o),
        oracle.bernoulli: lambda: torch.distributions.Bernoulli(logits=o),
        oracle.poisson: lambda: torch.distributions.Poisson(o.exp()),
    }
    close(p.total_loss(p.f, 0.7 * UNIT), -density[p.loss]().log_prob(p.Y).sum())


def test_groups_follow_the_order_of_the_weights():
    net, X, Y, likelihood = cases.CASES["mlp"].make()
    prior = oracle.grouped(net, lambda name: name.rpartition(".")[2])
    assert prior.group.tolist() == [0] * 15 + [1] * 5 + [0] * 5 + [1]
    assert prior.sums(prior.scale).tolist() == [20, 6]
    scaled = oracle.g_prior(oracle.problem(net, X, Y, likelihood), prior, UNIT)
    S = oracle.problem(net, X, Y, likelihood).J.flatten(0, -2).square().sum(0)
    close(scaled.precision(torch.tensor([1.0, 2.0], dtype=S.dtype))[-1], 2 * S[prior.group == 1].mean())


# --- the weights


@MODELS
@cases.every()
def test_theta_star_is_stationary(case, model):
    p, prior, z = setting(case, model=model)
    Lambda, sigma = unpack(p, prior, z)
    theta = oracle.theta_star(p, Lambda, sigma).requires_grad_()
    (gradient,) = torch.autograd.grad(oracle.regularised_loss(p, theta, Lambda, sigma), theta)
    close(gradient, torch.zeros_like(gradient))


@MODELS
@cases.every(GAUSSIAN)
def test_theta_star_of_the_gaussian_solves_the_normal_equations(case, model):
    p, prior, z = setting(case, model=model)
    Lambda, sigma = unpack(p, prior, z)
    rhs = torch.einsum("n...p,n...->p", p.J, p.Y - p.c) / sigma**2
    close(oracle.theta_star(p, Lambda, sigma), oracle.covariance(p, Lambda, sigma) @ rhs, rtol=1e-9)


# --- the evidence


@MODELS
@cases.every(GAUSSIAN)
def test_evidence_is_the_density_of_a_gaussian_process(case, model):
    """−F(θ⋆) = log N(y; c, σ²I + JΛ⁻¹Jᵀ), every constant in, whatever shares a noise."""
    outputs = case.make()[2].shape[1:]
    for shape in {(), (outputs[0], *(1 for _ in outputs[1:]))}:
        p, prior, z = setting(case, model=model, noise_shape=shape)
        Lambda, sigma = unpack(p, prior, z)
        close(-oracle.profile(p, Lambda, sigma), oracle.gp_log_density(p, Lambda, sigma))
        theta = oracle.theta_star(p, Lambda, sigma)
        close(oracle.log_evidence(p, theta, Lambda, sigma), oracle.gp_log_density(p, Lambda, sigma))


@MODELS
@cases.every(ONE_EACH)
def test_gradient_of_the_evidence(case, model):
    """∂F/∂log λ_g = ½(λ_g‖θ_g‖² − γ_g), ∂F/∂log σ² = ½(N − RSS/σ² − γ); and both by finite differences."""
    p, prior, z = setting(case, model=model)
    F = lambda z: oracle.profile(p, *unpack(p, prior, z))  # noqa: E731
    gradient = torch.autograd.functional.jacobian(F, z)
    h = 1e-4 * torch.eye(len(z), dtype=z.dtype)
    close(gradient, torch.stack([(F(z + d) - F(z - d)) / 2e-4 for d in h]), rtol=1e-6)

    Lambda, sigma = unpack(p, prior, z)
    theta, gamma = oracle.theta_star(p, Lambda, sigma), oracle.effective_dimensions(p, prior, Lambda, sigma)
    expected = (prior.sums(Lambda * theta**2) - gamma) / 2
    if sigma.numel():
        residual = ((p.Y - p.outputs(theta)) / sigma).square().sum()
        expected = torch.cat([expected, (p.Y.numel() - residual - gamma.sum())[None] / 2])
    close(gradient, expected, rtol=1e-9)


@cases.every(ONE_EACH)
def test_objective_is_convex_in_the_logs_at_fixed_weights(case):
    p, prior, _ = setting(case)
    generator = torch.Generator().manual_seed(1)
    size = prior.size + math.prod(p.noise_shape)
    theta = torch.randn(p.theta.shape, generator=generator, dtype=torch.float64)
    F = lambda z: oracle.objective(p, theta, *unpack(p, prior, z))  # noqa: E731
    for a, b in 3 * torch.randn(20, 2, size, generator=generator, dtype=torch.float64):
        assert F((a + b) / 2) <= (F(a) + F(b)) / 2 + 1e-10


@cases.every(ONE_EACH)
def test_objective_is_convex_in_the_weights(case):
    p, prior, z = setting(case)
    Lambda, sigma = unpack(p, prior, z)
    generator = torch.Generator().manual_seed(1)
    for a, b in torch.randn(20, 2, len(p.theta), generator=generator, dtype=torch.float64):
        ends = [oracle.regularised_loss(p, theta, Lambda, sigma) for theta in (a, b)]
        assert oracle.regularised_loss(p, (a + b) / 2, Lambda, sigma) <= sum(ends) / 2


# --- its optimum


@MODELS
@cases.every(ONE_EACH)
def test_optimum_is_the_fixed_point_of_mackay(case, model):
    """λ = γ / Σ tⱼθⱼ² and, per output, σ² = RSS/(N − γ)."""
    shape = (2,) if case.name == "mlp-two-outputs" else ()
    p, prior, _ = setting(case, key=lambda name: "all", model=model, noise_shape=shape)
    best = oracle.optimum(p, prior)
    for log_lambda in torch.arange(-8, 23, 2.0, dtype=torch.float64):
        Lambda = prior.precision(log_lambda.exp()[None])
        assert best.objective <= oracle.profile(p, Lambda, best.sigma) + 1e-10
    gamma = oracle.effective_dimensions(p, prior, best.precision, best.sigma)
    close(best.lambdas, gamma / prior.sums(prior.scale * best.theta**2), rtol=1e-9)
    if best.sigma.numel():
        variance = oracle.predictive_variance(p.J, oracle.covariance(p, best.precision, best.sigma))
        gamma = (variance / best.sigma**2).sum(0).sum_to_size(shape)
        rss = (p.Y - p.outputs(best.theta)).square().sum(0).sum_to_size(shape)
        close(best.sigma**2, rss / (p.Y.numel() / math.prod(shape) - gamma), rtol=1e-9)


@cases.every(cases.named("mlp-relu", "bernoulli", "weight-norm", "gru"))
def test_optimum_over_many_groups_is_a_minimum(case):
    """Stationary but for pruned groups, which end at the bound, and not above anything nearby."""
    p, prior, z = setting(case, key=str)
    best = oracle.optimum(p, prior)
    free = torch.cat([best.lambdas, best.sigma.flatten() ** 2]).log().abs() < 22.9
    assert free.sum() >= 1
    close(best.gradient[free], torch.zeros(int(free.sum()), dtype=torch.float64))
    assert best.gradient.abs().max() < 1e-6
    here = torch.cat([best.lambdas, best.sigma.flatten() ** 2]).log()
    for scale in (1e-3, 1e-2, 1e-1):
        step = torch.linspace(-scale, scale, len(z), dtype=torch.float64)
        assert oracle.profile(p, *unpack(p, prior, here + step)) >= best.objective - 1e-9


@cases.every([case for case in GAUSSIAN if case.make()[2].shape[1:] == (1,)])
def test_one_group_equals_bayesian_ridge_of_scikit_learn(case):
    p, *_ = setting(case)
    prior = oracle.Prior(torch.zeros_like(p.theta, dtype=torch.long), torch.ones_like(p.theta))
    best = oracle.optimum(p, prior)
    flat = dict.fromkeys(["alpha_1", "alpha_2", "lambda_1", "lambda_2"], 0.0)
    ridge = BayesianRidge(fit_intercept=False, compute_score=True, tol=1e-13, max_iter=100_000, **flat)
    ridge.fit(p.J[:, 0].numpy(), p.Y[:, 0].numpy())
    close(best.lambdas.item(), ridge.lambda_, rtol=1e-8)
    close(best.sigma.item() ** -2, ridge.alpha_, rtol=1e-8)
    close(best.theta, ridge.coef_, rtol=1e-8)
    close(-best.objective, ridge.scores_[-1], rtol=1e-8)
    close(oracle.covariance(p, best.precision, best.sigma), ridge.sigma_, rtol=1e-8)


def test_given_noise_is_kept():
    p, prior, _ = setting(cases.CASES["mlp"])
    best = oracle.optimum(p, prior, sigma=0.3 * UNIT)
    assert best.sigma == 0.3 * UNIT
    assert len(best.gradient) == prior.size


def test_naive_method_keeps_the_trained_weights():
    p, prior, _ = setting(cases.CASES["mlp-two-outputs"], key=lambda name: "all", model="affine")
    close(p.outputs(p.theta), p.f)
    best = oracle.optimum(p, prior, weights=oracle.trained)
    gamma = oracle.effective_dimensions(p, prior, best.precision, best.sigma)
    close(best.lambdas, gamma / prior.sums(prior.scale * p.theta**2))
    close(best.sigma**2, (p.Y - p.f).square().sum() / (p.Y.numel() - gamma.sum()))


def test_curvature_at_the_optimum_lowers_the_evidence_of_an_overconfident_network():
    net, X, Y, likelihood = cases.CASES["mlp-classes"].make()
    with torch.no_grad():
        net[2].weight *= 20
        net[2].bias *= 20
    p, prior = oracle.problem(net, X, Y, likelihood), oracle.grouped(net, lambda name: "all")
    best = oracle.optimum(p, prior)
    assert oracle.log_evidence(p, best.theta, best.precision, best.sigma) < -best.objective - 1


# --- the predictive


@cases.every(GAUSSIAN)
def test_predictive_covariance_is_that_of_the_gaussian_process(case):
    """JΣJᵀ = k** − k*ᵀ(K + σ²I)⁻¹k*, on the first two examples after fitting the others."""
    p, prior, z = setting(case)
    rest = oracle.Problem(p.J[2:], p.f[2:], p.c[2:], p.Y[2:], p.theta, p.loss, p.noise_shape)
    Lambda, sigma = unpack(p, prior, z)
    new, old = p.J[:2].flatten(1, -2), p.J[2:].flatten(0, -2)
    K = (old / Lambda) @ old.T + sigma**2 * torch.eye(len(old), dtype=old.dtype)
    cross = (new / Lambda) @ old.T
    expected = (new / Lambda) @ new.mT - cross @ torch.linalg.solve(K, cross.mT)
    close(oracle.predictive_covariance(p.J[:2], oracle.covariance(rest, Lambda, sigma)), expected, rtol=1e-9)


def test_probit_approximates_the_integral_over_a_gaussian():
    nodes, weights = (torch.tensor(a) for a in hermegauss(60))
    for mean, variance in itertools.product([-3.0, -0.5, 0.0, 2.0], [0.0, 0.3, 3.0, 10.0]):
        integral = (mean + variance**0.5 * nodes).sigmoid() @ weights / weights.sum()
        close(oracle.probit("bernoulli", mean * UNIT, variance * UNIT), integral, rtol=0.02)


def test_probit_goes_from_the_softmax_to_no_opinion():
    f = setting(cases.CASES["image-classes"])[0].f
    close(oracle.probit("categorical", f, torch.zeros_like(f)), f.softmax(1))
    close(oracle.probit("categorical", f, torch.full_like(f, 1e12)), torch.full_like(f, 1 / 3), rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (2,)], ids=["shared", "per-output"])
def test_both_forms_of_the_network_noise_agree_at_the_optimum(shape):
    p, prior, _ = setting(cases.CASES["mlp-two-outputs"], noise_shape=shape)
    best = oracle.optimum(p, prior)
    noise = oracle.network_noise(p, best.theta, best.sigma)
    assert (noise > best.sigma).all()
    close(noise, oracle.network_noise_off_optimum(p, best.precision, best.sigma), rtol=1e-9)


# --- the registry


@cases.every()
def test_each_case_is_small_and_hands_out_copies(case):
    net, *_ = case.make()
    assert sum(p.numel() for p in net.parameters()) <= 200
    assert all(t.dtype == torch.float64 for t in net.state_dict().values() if t.is_floating_point())
    assert not net.training
    assert all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    again, *_ = case.make()
    assert parameters_to_vector(again.parameters()).abs().sum() > 0


@cases.every()
def test_each_case_is_neither_random_nor_optimal(case):
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood)
    torch.manual_seed(0)
    start = case.build().double()(X).detach()
    assert p.total_loss(p.f, UNIT) < p.total_loss(start, UNIT)
    o = p.f.clone().requires_grad_()
    (residual,) = torch.autograd.grad(p.total_loss(o, UNIT), o)
    assert torch.einsum("n...p,n...->p", p.J, residual).norm() > 1e-2


def test_batch_norm_has_running_statistics_of_its_own():
    net, *_ = cases.CASES["batch-norm"].make()
    assert (net[1].running_mean.abs() > 1e-3).all()
    assert ((net[1].running_var - 1).abs() > 1e-3).all()
