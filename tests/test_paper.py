"""The paper's section 2: the linearised Laplace method.

Antorán et al., "Adapting the Linearised Laplace Model Evidence for Modern Deep Learning" (ICML 2022). Tests are named
after its statements, numbered as they are printed there, with their LaTeX labels. Where the paper writes ‖θ‖²_Λ for the
regulariser, ½‖θ‖²_Λ is meant: only then do a prior of precision Λ, the Hessian H + Λ (equation 5) and the evidence
(equation 8) agree with one another.
"""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal, Poisson
from torch.func import grad, hessian

import cases
import linlap as ll
import oracle
from cases import Case, normal
from fitted import LIKELIHOODS, UNIT, close, fit, flat, noise, precision
from linlap import evidence
from linlap.curvature.dense import Dense
from linlap.evidence import Setting
from linlap.objective import Objective, Point
from linlap.problem import Problem, pose
from losses import Loss, linear_loss, minus_evidence, network_loss, outputs, random, train_to_the_end, weights_of

ONE_EACH = cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image-classes")
SMOOTH = cases.named("mlp", "mlp-classes", "poisson")
MODELS = pytest.mark.parametrize("model", ["linear", "affine"])
HALF = 0.5 * UNIT


# --- model and approximation


@cases.every(ONE_EACH)
def test_equations_1_and_2_loss_is_minus_the_log_posterior(case):
    """L_{f,Λ}(θ) = Σℓ(f(θ, xᵢ), yᵢ) + ½‖θ‖²_Λ (eq:optobj) and dP/dν ∝ exp(−L_{f,Λ}): the same but for a constant."""
    net, X, Y, likelihood = case.make()
    family = {
        "gaussian": lambda o: Normal(o, 0.5),
        "categorical": lambda o: Categorical(logits=o.movedim(1, -1)),
        "bernoulli": lambda o: Bernoulli(logits=o),
        "poisson": lambda o: Poisson(o.exp()),
    }[likelihood]
    given = ll.Gaussian(noise=0.5) if likelihood == "gaussian" else LIKELIHOODS[likelihood]
    problem = pose(ll.linearise(net), (X, Y), given, "affine", 2**30)
    Lambda = random(problem.weights).exp()
    loss, constants = Objective(problem, Lambda), []
    for seed in range(3):
        theta = problem.trained + 0.3 * random(problem.weights, seed=seed)
        f = outputs(net, X, theta).detach()
        log_posterior = family(f).log_prob(Y).sum() + Normal(0.0, Lambda.rsqrt()).log_prob(theta).sum()
        constants.append(loss(Point(theta, f.flatten(1))) + float(log_posterior))
    close(constants[1:], constants[:1] * 2, 1e-12)


@cases.every(SMOOTH)
def test_equation_3_affine_model_is_the_first_order_expansion(case):
    """h(θ, x) = f(θ̃, x) + ∂f(θ̃, x)·(θ − θ̃) (eq:h-def): off by a second order, so by a hundredth at a tenth."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, model="affine")
    (f, J), theta = oracle.jacobian(net, X), weights_of(net)
    close(post.predict(X, mean="linear").mean, f + J @ (flat(post.weights) - theta), 1e-10)
    v = random(len(theta))
    errors = [(outputs(net, X, theta + t * v) - f - t * (J @ v)).norm() for t in (1e-3, 1e-4)]
    assert 98 < errors[0] / errors[1] < 102


@cases.every(SMOOTH)
def test_equation_4_quadratic_approximation_at_a_minimum(case):
    """G(θ) = L_{h,Λ}(θ̃) + ½‖θ − θ̃‖²_{H+Λ} (eq:G_function) is L_{h,Λ} to second order if θ̃ is a minimum of L_{f,Λ}.

    Then the gradients of L_{f,Λ} and L_{h,Λ} both vanish at θ̃. For the Gaussian likelihood nothing is left out.
    """
    net, X, Y, likelihood = case.make()
    Lambda = torch.full_like(weights_of(net), 0.3)
    train_to_the_end(net, X, oracle.problem(net, X, Y, likelihood), Lambda, HALF)
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    loss = linear_loss(p, Lambda, HALF)
    assert grad(network_loss(net, X, p, Lambda, HALF))(p.theta).norm() < 1e-8
    assert grad(loss)(p.theta).norm() < 1e-8
    errors = []
    for t in (1e-2, 1e-3):
        step = t * random(len(p.theta))
        G = loss(p.theta) + 0.5 * step @ (p.H(p.f, HALF) + Lambda.diag()) @ step
        errors.append(abs(float(loss(p.theta + step) - G)))
    if likelihood == "gaussian":
        assert max(errors) < 1e-10
    else:
        assert 700 < errors[0] / errors[1] < 1300  # a third order


@cases.every(ONE_EACH)
def test_equation_5_hessian_of_the_linear_models_loss(case):
    """∂²L_{h,Λ}(θ̃) = H + Λ with H = ∂²[L(h(θ, ·))](θ̃), which is Σᵢ JᵢᵀWᵢJᵢ: the library's posterior precision."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="tensor", evidence_at="trained", model="affine")
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    second = hessian(linear_loss(p, precision(post), noise(post, p)))(p.theta)
    close(torch.linalg.inv(post.factor.dense()), second, 1e-8)


@pytest.mark.parametrize("evidence_at", ["trained", "optimum"])
@cases.every(ONE_EACH)
def test_equation_6_predictive_is_the_networks_mean_with_a_linear_models_variance(case, evidence_at):
    """h(θ, ·) ~ N(f(θ̃, ·), ‖J(·)‖²_{(H+Λ)⁻¹}) (eq:h-posterior), for inputs not seen too."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X[:-3], Y[:-3]), likelihood, evidence_at=evidence_at)
    p = oracle.problem(net, X[:-3], Y[:-3], likelihood)
    pred, (f, J) = post.predict(X), oracle.jacobian(net, X)
    close(pred.mean, f, 1e-14)
    close(pred.cov, oracle.predictive_covariance(J, oracle.covariance(p, precision(post), noise(post, p))), 1e-8)


# --- model selection


class TwoWeights(nn.Module):
    """θ₂ tanh(θ₁ x): few enough weights to integrate over them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.tensor(0.8)), nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer * (self.inner * x).tanh()


TWO_WEIGHTS = [Case(f"two-weights-{g}", g, TwoWeights, normal(12, 1)) for g in ("gaussian", "poisson")]


def log_integral(energy: Loss, centre: Tensor, covariance: Tensor) -> float:
    """log ∫ exp(−energy) over two weights, by the trapezoidal rule on ±9 standard deviations."""
    line = torch.linspace(-9, 9, 181, dtype=torch.float64)
    root = torch.linalg.cholesky(covariance)
    values = -torch.func.vmap(energy)(centre + torch.cartesian_prod(line, line) @ root.mT)
    return float(values.logsumexp(0) + 2 * (line[1] - line[0]).log() + root.diagonal().log().sum())


def prior_constant(Lambda: Tensor) -> float:
    """½ log det(Λ/2π)."""
    return float((Lambda / (2 * math.pi)).log().sum()) / 2


@cases.every(TWO_WEIGHTS)
def test_equation_7_evidence_is_an_integral_over_the_weights(case):
    """M_θ̃(Λ) = log ∫ exp(−G_θ̃(θ)) dν, once the regulariser has its constant ½ log det(Λ/2π), which is not printed.

    Without it equation 8 would not follow: it turns log det(H + Λ) into log det(Λ⁻¹H + I).
    """
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="tensor", evidence_at="trained")
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    Lambda, sigma = precision(post), noise(post, p)
    A, at = p.H(p.f, sigma) + Lambda.diag(), linear_loss(p, Lambda, sigma)(p.theta)

    def G(theta: Tensor) -> Tensor:
        return at + 0.5 * (theta - p.theta) @ A @ (theta - p.theta)

    integral = log_integral(G, p.theta, torch.linalg.inv(A))
    close(post.log_evidence, integral + prior_constant(Lambda), 1e-10)


@MODELS
def test_equation_7_for_the_linear_model_itself(model):
    """log ∫ exp(−L_{h,Λ}(θ)) dν, nothing approximated: the library's log evidence, for the Gaussian likelihood."""
    net, X, Y, likelihood = TWO_WEIGHTS[0].make()
    post = fit(net, (X, Y), likelihood, prior="single", model=model)
    p = oracle.problem(net, X, Y, likelihood, model=model)
    Lambda, sigma = precision(post), noise(post, p)
    integral = log_integral(linear_loss(p, Lambda, sigma), flat(post.weights), oracle.covariance(p, Lambda, sigma))
    close(post.log_evidence, integral + prior_constant(Lambda), 1e-10)


def posed(case: Case, model: str) -> tuple[Problem, Setting]:
    """The library's problem of a case, with a noise and a precision a tensor at random."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="tensor", evidence_at="trained", model=model)
    setting = post.setting.at(random(len(post.setting.z)))
    return setting.pose(pose(ll.linearise(net), (X, Y), post.likelihood, model, 2**30)), setting


@cases.every(ONE_EACH)
def test_equations_8_and_9_closed_form_of_the_evidence(case):
    """M_θ(Λ) = −½[‖θ‖²_Λ + log det(Λ⁻¹H + I)] + C: at θ̃ (eq:model-evidence), at θ⋆ (eq:model-evidence-new), anywhere.

    C is minus the data-fit term, where no Λ enters; H is taken at θ̃ for all of them.
    """
    problem, setting = posed(case, "affine")
    p = oracle.problem(*case.make(), model="affine")
    sigma = torch.as_tensor([] if setting.noise is None else setting.noise).reshape(p.noise_shape)
    curvature, H = Dense().of(problem, problem.network_outputs), p.H(p.f, sigma)
    for theta in (p.theta, oracle.theta_star(p, setting.prior.precision, sigma), random(len(p.theta))):
        point, C = Point(theta, problem.linear_outputs(theta)), -p.total_loss(p.outputs(theta), sigma)
        for seed in range(3):
            prior = setting.prior.at(random(len(setting.prior.log_precision), seed=seed))
            there = Setting(prior, setting.noise, setting.learns_noise)
            value = -evidence.objective(problem, there, curvature.factor(prior, there.noise_precision), point)
            Lambda = prior.precision
            log_det = torch.linalg.slogdet(H / Lambda.unsqueeze(1) + torch.eye(len(H)))[1]
            close(value, -0.5 * ((Lambda * theta**2).sum() + log_det) + C, 1e-10)


@cases.every(cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "layer-norm"))
def test_evidence_is_concave_in_the_precisions(case):
    """ "Maximising M_θ̃ is a concave optimisation problem" over positive diagonal Λ: it is, and in log Λ as well."""
    p = oracle.problem(*case.make())
    minus_M = minus_evidence(p.H(p.f, HALF), p.theta)
    for seed in range(2):
        Lambda = random(len(p.theta), seed=seed).exp()
        for bend in (hessian(minus_M)(Lambda), hessian(lambda z: minus_M(z.exp()))(Lambda.log())):
            values = torch.linalg.eigvalsh(bend)
            assert values[0] > -1e-12 * values[-1]
