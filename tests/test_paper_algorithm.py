"""The paper's appendices on Algorithm 1, which fits θ⋆, and on inference in the space of observations.

Labels are those of Antorán et al. (ICML 2022). `ll.PaperSolver` is its solver, Adam with an early end; the library's own
is Newton's, with a certificate. Both minimise one strictly convex function, from zero or from θ̃.
"""

import copy
import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import Tensor, nn

import cases
import linlap as ll
import oracle
from cases import Case
from fitted import LIKELIHOODS, UNIT, close, fit, flat, precision
from linlap.alternate import AtOptimum
from linlap.curvature.base import Curvature, Factor
from linlap.curvature.dense import Dense
from linlap.errors import ConvergenceWarning
from linlap.evidence import Setting
from linlap.objective import Objective
from linlap.paper import finite_differences
from linlap.problem import Problem, pose
from linlap.weights import Optimum, trained_start, zero_start
from losses import random

ONE_EACH = cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image-classes")
MODELS = pytest.mark.parametrize("model", ["linear", "affine"])

Posed = tuple[Problem, Setting, Curvature, Factor]


def posed(case: Case, model: str, log_precision: float = 0.0) -> Posed:
    """The library's problem of a case under one λ and σ = ½, with the curvature at θ̃."""
    net, X, Y, likelihood = case.make()
    given = ll.Gaussian(noise=0.5) if likelihood == "gaussian" else LIKELIHOODS[likelihood]
    start = fit(net, (X, Y), given, prior="single", evidence_at="trained", model=model).setting
    setting = start.at(torch.full_like(start.z, log_precision))
    problem = pose(ll.linearise(net), (X, Y), given, model, 2**30)
    curvature = Dense().of(problem, problem.network_outputs)
    return problem, setting, curvature, curvature.factor(setting.prior, setting.noise_precision)


def newton(at: Posed, start, tolerance: float) -> Optimum:
    return AtOptimum(tolerance).settle(*at, start(at[0]))


def paper(at: Posed, **options) -> Optimum:
    return ll.PaperSolver(**options).first(*at)


# --- Algorithm 1: the Jacobian-vector product


def relu_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))


def cnn() -> nn.Module:
    first, second = nn.Conv2d(1, 8, 5, 2, 2), nn.Conv2d(8, 12, 3, 2, 1)
    body = (first, nn.ReLU(), nn.BatchNorm2d(8), second, nn.ReLU(), nn.BatchNorm2d(12))
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


def tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))


def twins(build, shape: tuple[int, ...]) -> tuple[Problem, Problem, Tensor]:
    """One network in single and in double precision, and a direction v."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, X = build(), torch.randn(shape)
        for _ in range(20):  # so that batch norm has statistics
            net(X)
    problems = []
    for dtype in (torch.float32, torch.float64):
        alike, inputs = copy.deepcopy(net).to(dtype).eval(), X.to(dtype)
        targets = torch.zeros_like(alike(inputs)).detach()
        problems.append(pose(ll.linearise(alike), (inputs, targets), ll.Gaussian(noise=1.0), "linear", 2**30))
    return *problems, random(problems[0].weights)


def error(product: Tensor, exact: Tensor) -> float:
    return float((product.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("build", "shape"), [(relu_net, (200, 2)), (cnn, (64, 1, 14, 14))])
def test_algorithm_1_finite_differences_are_off_by_percents_in_single_precision(build, shape):
    """Step δ = √ε(1 + ‖θ̃‖∞)/‖v‖∞, ŷ ≈ (f(θ̃ + δv) − f(θ̃ − δv))/2δ; forward mode is right to 2e-6.

    It is truncation, not rounding: at δ the network has crossed kinks of its ReLUs, and in double precision the same δ
    is as far off. The step that double precision takes itself is good to 1e-8. The norm of v does not matter.
    """
    single, double, v = twins(build, shape)
    inputs, inputs64 = (p.batches[0].inputs for p in (single, double))
    exact = double.linearised.jvp(inputs64, v)[1]
    off = error(finite_differences(single, inputs, v), exact)
    assert 5e-3 < off < 1e-1
    assert error(single.linearised.jvp(inputs, v)[1], exact) < 2e-6
    assert error(finite_differences(double, inputs64, v), exact) < 1e-8
    trained = double.trained
    step = torch.finfo(torch.float32).eps ** 0.5 * (1 + trained.abs().max()) / v.abs().max()
    ends = [double.linearised.outputs_at(trained + s * step * v, inputs64) for s in (1, -1)]
    assert error((ends[0] - ends[1]) / (2 * step), exact) == pytest.approx(off, rel=0.01)
    for scale in (1e-3, 1e3):
        assert error(finite_differences(single, inputs, scale * v) / scale, exact) == pytest.approx(off, rel=0.01)


def test_algorithm_1_finite_differences_cost_about_as_much_as_forward_mode():
    """Found "slightly faster" in the paper: two forward passes beside one of doubled work. Within a factor of four here."""
    single, _, v = twins(cnn, (256, 1, 14, 14))
    inputs = single.batches[0].inputs

    def seconds(product: Callable[[], Tensor]) -> float:
        start = time.perf_counter()
        product()
        return time.perf_counter() - start

    ways = (lambda: finite_differences(single, inputs, v), lambda: single.linearised.jvp(inputs, v)[1])
    ratios = [seconds(ways[0]) / seconds(ways[1]) for _ in range(12)]
    assert 0.25 < median(ratios[2:]) < 4


def test_algorithm_1_finite_differences_of_a_smooth_network_are_off_by_rounding():
    """Forward mode is "more numerically stable" there too: by a factor above 50, in single and in double precision."""
    single, double, v = twins(tanh_net, (200, 2))
    exact = double.linearised.jvp(double.batches[0].inputs, v)[1]
    inputs = single.batches[0].inputs
    assert error(single.linearised.jvp(inputs, v)[1], exact) < 1e-6
    assert 2e-5 < error(finite_differences(single, inputs, v), exact) < 5e-4
    assert 1e-11 < error(finite_differences(double, double.batches[0].inputs, v), exact) < 1e-8


# --- Algorithm 1: the gradient, and Adam


@MODELS
@cases.every(ONE_EACH)
def test_algorithm_1_is_adam_on_the_linear_models_loss(case, model):
    """gᵀJ(x) with g = ∂ℓ(Jv, y) and Λv: the steps of torch's Adam on L_{h,Λ}/N by mini-batches, with J dense."""
    at = posed(case, model)
    p = oracle.problem(*case.make(), model=model)
    Lambda, sigma = at[1].prior.precision, 0.5 * UNIT
    theta = torch.zeros_like(p.theta, requires_grad=True)
    adam = torch.optim.Adam([theta], lr=1e-2)
    for _ in range(3):
        for rows in torch.arange(len(p.f)).split(7):
            part = oracle.Problem(p.J[rows], p.f[rows], p.c[rows], p.Y[rows], p.theta, p.loss, p.noise_shape)
            adam.zero_grad()
            fit_term = part.total_loss(part.outputs(theta), sigma) / len(rows)
            (fit_term + 0.5 * (Lambda * theta**2).sum() / len(p.f)).backward()
            adam.step()
    close(paper(at, rate=1e-2, epochs=3, batch=7).weights, theta.detach(), 1e-9)


@pytest.mark.parametrize("start", ["zero", "trained"])
@cases.every(cases.named("mlp", "mlp-relu", "mlp-classes"))
def test_algorithm_1_takes_the_same_steps_by_forward_mode_and_by_finite_differences(case, start):
    """In double precision: a hundred steps to 1e-6."""
    at = posed(case, "affine")
    ends = [paper(at, product=product, start=start, rate=1e-2) for product in ("forward", "finite-differences")]
    close(ends[1].weights, ends[0].weights, 1e-6)
    close(ends[1].objective, ends[0].objective, 1e-8)


@cases.every(cases.named("mlp", "mlp-classes"))
def test_algorithm_1_approaches_newtons_optimum_from_above(case):
    at = posed(case, "affine", log_precision=1.0)
    best = newton(at, zero_start, 1e-14)
    gaps = [paper(at, rate=3e-2, epochs=epochs).objective - best.objective for epochs in (25, 75, 225)]
    assert gaps[0] > 4 * gaps[1] > 16 * gaps[2] > 0
    assert gaps[2] < 1e-3 * best.objective


@cases.every(cases.named("mlp", "mlp-classes", "poisson"))
def test_algorithm_1_with_the_papers_settings_ends_early_and_says_so(case):
    """Rate 1e-4, 100 epochs of one step: no weight gets much further than 0.01; the decrement knows the gap."""
    at = posed(case, "affine", log_precision=-2.0)
    best, end = newton(at, zero_start, 1e-14), paper(at)
    assert not end.converged
    assert end.weights.abs().max() < 0.011 < best.weights.abs().max()
    gap = end.objective - best.objective
    assert gap > 1
    if case.likelihood == "gaussian":
        assert end.decrement == pytest.approx(gap, rel=1e-6)


@pytest.mark.parametrize("product", ["forward", "finite-differences"])
@cases.every(cases.named("mlp", "mlp-classes"))
def test_fit_with_the_papers_solver_is_reported_as_not_converged(case, product):
    net, X, Y, likelihood = case.make()
    solver = ll.PaperSolver(product=product, epochs=20)
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        post = fit_by_paper(net, X, Y, likelihood, solver, most_rounds=3)
    assert not post.status.converged
    assert post.history[-1] > fit(net, (X, Y), likelihood, prior="single", model="affine").history[-1] + 0.1


def fit_by_paper(net, X, Y, likelihood, solver, most_rounds: int) -> ll.Posterior:
    options = {"prior": "single", "model": "affine", "progress": False, "most_rounds": most_rounds}
    return ll.fit(net, (X, Y), LIKELIHOODS[likelihood], solver=solver, **options)


@cases.every(cases.named("mlp", "mlp-classes"))
def test_fit_with_the_papers_solver_moves_the_weights_by_adam_alone(case):
    """So that its tables can be reproduced: from zero, by hardly more than the rate a step, before and in each round."""
    net, X, Y, likelihood = case.make()
    with pytest.warns(ConvergenceWarning):
        post = fit_by_paper(net, X, Y, likelihood, ll.PaperSolver(epochs=20), most_rounds=10)
    assert 0 < flat(post.weights).abs().max() < 1.1 * 1e-4 * 20 * 11


# --- "full" from zero and "full, NN" from θ̃: one strictly convex problem


def apart(at: Posed, one: Optimum, other: Optimum) -> float:
    """The difference of two predictions, weighted with W^½."""
    problem, difference = at[0], one.outputs - other.outputs
    return float((problem.likelihood.curve(one.outputs, problem.targets, difference) * difference).sum()) ** 0.5


@MODELS
@cases.every([*ONE_EACH, *cases.named("mlp-relu", "layer-norm", "batch-norm", "attention")])
def test_two_starts_of_newtons_method_agree(case, model):
    """W-weighted predictions within √2δ₁ + √2δ₂ of the decrements δ they report, also where they stop early."""
    at = posed(case, model, log_precision=-3.0)
    for tolerance in (1e-3, 1e-6, 1e-14):
        ends = [newton(at, start, tolerance) for start in (zero_start, trained_start)]
        assert all(end.converged for end in ends)
        allowed = sum((2 * end.decrement) ** 0.5 for end in ends)
        assert apart(at, *ends) <= 1.01 * allowed + 1e-12
    assert apart(at, *ends) < 1e-6
    close(ends[0].weights, ends[1].weights, 1e-6)
    close(ends[0].objective, ends[1].objective, 1e-12)


@cases.every(cases.with_likelihood("gaussian")[:4])
def test_two_starts_of_the_papers_solver_differ_by_what_is_missing_to_convergence(case):
    """Its tables' "full" and "full, NN" are two ends of one problem: their distance is within the decrements."""
    at = posed(case, "affine", log_precision=-2.0)
    ends = [paper(at, start=start, epochs=50) for start in ("zero", "trained")]
    assert apart(at, *ends) > 1
    assert apart(at, *ends) <= sum((2 * end.decrement) ** 0.5 for end in ends)
    assert not any(end.converged for end in ends)
    objective, best = Objective(at[0], at[1].prior.precision), newton(at, trained_start, 1e-14)
    for end in ends:
        assert objective(end) - best.objective == pytest.approx(end.decrement, rel=1e-6)


# --- appendix: inference in the space of observations


class Reconstruction(nn.Module):
    """An image z = f(θ), seen through a linear operator A: what is compared with y is A z."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.GELU(), nn.Conv2d(2, 1, 3, padding=1), nn.Flatten())
        self.A = nn.Linear(25, 8, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.A(self.f(x))


@pytest.mark.parametrize("curvature", ["dense", "dual"])
def test_equation_14_inverse_problem_is_solved_in_the_space_of_observations(curvature):
    """y = Az + η (eq:inverse_problem), z = Jθ with θ ~ N(0, Λ⁻¹), thus z ~ N(0, JΛ⁻¹Jᵀ): z given y, and its evidence."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = Reconstruction().double(), torch.randn(1, 1, 5, 5, dtype=torch.float64)
    y = net(x).detach() + 0.1 * random(1, 8)
    post = fit(net, (x, y), ll.Gaussian(noise=0.1), prior="layer", curvature=curvature)
    J = ll.linearise(net.f).jacobian(x)
    C = (J[0] / precision(post)) @ J[0].mT
    A = net.A.weight.detach()
    K = A @ C @ A.mT + 0.01 * torch.eye(8, dtype=torch.float64)
    gain = C @ A.mT @ torch.linalg.inv(K)
    close(J[0] @ flat(post.weights), gain @ y[0], 1e-8)
    close(post.factor.covariance(J)[0], C - gain @ A @ C, 1e-8)
    expected = torch.distributions.MultivariateNormal(torch.zeros_like(y[0]), K).log_prob(y[0])
    close(post.log_evidence, expected, 1e-10)
