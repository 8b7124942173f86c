"""The paper's section 3.1: the evidence at the optimum θ⋆ of the linear model, Recommendation 1, and what it rests on.

Numbers and LaTeX labels are those of Antorán et al. (ICML 2022), where propositions and lemmas are counted together:
Proposition 3 is the first of section 4. The "simple" model of its tables is our "linear", the "full" one our "affine".
"""

from functools import partial
from itertools import pairwise

import pytest
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.func import grad, hessian

import cases
import linlap as ll
import oracle
from cases import Case, normal, relu, sequential
from fitted import LIKELIHOODS, UNIT, close, fit, flat, noise, precision
from linlap.alternate import AtOptimum
from linlap.curvature.dense import Dense
from linlap.objective import Objective, Point
from linlap.problem import pose
from losses import linear_loss, minus_evidence, random, train_to_the_end, weights_of

ONE_EACH = cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image-classes")
GAUSSIAN = cases.with_likelihood("gaussian")
SMOOTH = cases.named("mlp", "mlp-classes", "poisson")
MODELS = pytest.mark.parametrize("model", ["linear", "affine"])
HALF = 0.5 * UNIT


def with_noise(likelihood: str):
    """σ = ½ where there is one, so that evidences of different λ may be compared."""
    return ll.Gaussian(noise=0.5) if likelihood == "gaussian" else LIKELIHOODS[likelihood]


def at_precision(case: Case, model: str, like: ll.Posterior) -> Tensor:
    """θ⋆ of that model under the Λ and σ of a posterior, by the library."""
    net, X, Y, _ = case.make()
    problem = like.setting.pose(pose(ll.linearise(net), (X, Y), like.likelihood, model, 2**30))
    curvature = Dense().of(problem, problem.network_outputs)
    factor = curvature.factor(like.setting.prior, like.setting.noise_precision)
    return AtOptimum(1e-12).first(problem, like.setting, curvature, factor).weights


# --- Proposition 3


@cases.every()
def test_proposition_3_not_a_minimum_of_the_network_then_not_of_its_linearisation(case):
    """∂L_{f,Λ}(θ̃) = ∂L_{h,Λ}(θ̃) (proposition:f-not-then-h-not): where it is not zero, θ⋆ is elsewhere, and lower."""
    net, X, Y, likelihood = case.make()
    problem = pose(ll.linearise(net), (X, Y), with_noise(likelihood), "affine", 2**30)
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    Lambda = random(len(p.theta)).exp()
    p.total_loss(net(X), HALF).backward()
    of_network = torch.cat([w.grad.flatten() for w in net.parameters()]) + Lambda * p.theta
    assert of_network.norm() > 0.1
    objective, there = Objective(problem, Lambda), Point(p.theta, problem.network_outputs)
    close(objective.gradient(there), of_network, 1e-10)
    downhill = Point(p.theta - 1e-6 * of_network, problem.linear_outputs(p.theta - 1e-6 * of_network))
    assert objective(downhill) < objective(there)


@cases.every(SMOOTH)
def test_proposition_3_conversely_a_minimum_of_the_network_is_one_of_its_linearisation(case):
    """Trained to the end under Λ, θ̃ is θ⋆ of the affine model: what section 2 assumes, and training does not give."""
    net, X, Y, likelihood = case.make()
    Lambda = torch.full_like(weights_of(net), 0.3)
    train_to_the_end(net, X, oracle.problem(net, X, Y, likelihood), Lambda, HALF)
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    close(oracle.theta_star(p, Lambda, HALF), p.theta, 1e-8)
    assert (oracle.theta_star(oracle.problem(net, X, Y, likelihood), Lambda, HALF) - p.theta).norm() > 0.1


# --- the joint stationary point


@MODELS
@cases.every(ONE_EACH)
def test_equation_of_the_joint_stationary_point(case, model):
    """θ⋆ ∈ argmin L_{h,Λ⋆} and Λ⋆ ∈ argmax M_θ⋆: both gradients vanish, and neither problem has a second optimum."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="tensor", model=model)
    p = oracle.problem(net, X, Y, likelihood, model=model)
    theta, Lambda, sigma = flat(post.weights), precision(post), noise(post, p)
    loss, minus_M = linear_loss(p, Lambda, sigma), minus_evidence(p.H(p.f, sigma), theta)
    assert grad(loss)(theta).norm() < 1e-6 * grad(loss)(torch.zeros_like(theta)).norm()
    assert torch.linalg.eigvalsh(hessian(loss)(theta))[0] > 0
    groups = oracle.grouped(net, str)
    logs = torch.stack([Lambda[groups.group == g].log().mean() for g in range(groups.size)])
    assert grad(lambda z: minus_M(groups.precision(z.exp())))(logs).abs().max() < 1e-5
    assert torch.linalg.eigvalsh(hessian(lambda z: minus_M(groups.precision(z.exp())))(logs))[0] > -1e-8


def best_precision(values, square: float) -> float:
    """The λ that maximises M_θ for H of these eigenvalues and ‖θ‖² = square: Σ s/(s + λ) = λ‖θ‖², MacKay's fixed point."""
    slope = lambda z: (values / (values + 10**z)).sum() - 10**z * square  # noqa: E731
    return 10 ** scipy.optimize.brentq(slope, -8, 8, xtol=1e-14)


@cases.every(SMOOTH)
def test_minimising_and_maximising_in_turn_leads_there(case):
    """Section 3.1's iteration, each step taken to its end, ends where `ll.fit` does; the objective falls on the way."""
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    values = torch.linalg.eigvalsh(p.H(p.f, HALF)).clamp(min=0).numpy()
    lam, history = 1.0, [float("inf")]
    for _ in range(500):
        Lambda = torch.full_like(p.theta, lam)
        theta = oracle.theta_star(p, Lambda, HALF)
        history.append(float(oracle.objective(p, theta, Lambda, HALF)))
        before, lam = lam, best_precision(values, float(theta @ theta))
        if abs(lam / before - 1) < 1e-9:
            break
    assert all(after <= before + 1e-10 for before, after in pairwise(history))
    post = fit(net, (X, Y), with_noise(likelihood), prior="single", model="affine")
    close(post.prior["all"], lam, 1e-6)
    close(flat(post.weights), theta, 1e-6)
    close(post.history[-1], history[-1], 1e-10)


# --- Recommendation 1


@MODELS
@cases.every(GAUSSIAN)
def test_recommendation_1_the_evidence_at_theta_star_is_exact(case, model):
    """rec:linear-weights. M_θ⋆ with its data-fit term is log p(Y|Λ, σ) of the linear model; at θ̃ it is too low.

    By L_{h,Λ}(θ̃) − L_{h,Λ}(θ⋆) = ½‖θ̃ − θ⋆‖²_{H+Λ}, which depends on Λ: so another Λ is best at θ̃, and worse.
    """
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood, model=model)
    post = fit(net, (X, Y), likelihood, prior="single", model=model)
    naive = fit(net, (X, Y), likelihood, prior="single", evidence_at="trained")
    exact = [oracle.gp_log_density(p, precision(q), noise(q, p)) for q in (post, naive)]
    close(post.log_evidence, exact[0], 1e-10)
    assert exact[0] > exact[1] + 1e-2
    Lambda, sigma = precision(naive), noise(naive, p)
    off = p.theta - oracle.theta_star(p, Lambda, sigma)
    missing = 0.5 * off @ (p.H(p.f, sigma) + Lambda.diag()) @ off
    close(-oracle.objective(p, p.theta, Lambda, sigma), exact[1] - missing, 1e-10)


@MODELS
@cases.every(ONE_EACH)
def test_recommendation_1_what_is_taken_where(case, model):
    """J and H at θ̃; θ⋆ in the evidence and Λ⋆ in the variance; the mean stays the network's. The naive θ̃ is no optimum."""
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood, model=model)
    post = fit(net, (X, Y), likelihood, prior="single", model=model)
    Lambda, sigma, theta = precision(post), noise(post, p), flat(post.weights)
    close(theta, oracle.theta_star(p, Lambda, sigma), 1e-7)
    close(post.history[-1], oracle.objective(p, theta, Lambda, sigma), 1e-10)
    Sigma = torch.linalg.inv(p.H(p.f, sigma) + Lambda.diag())
    pred = post.predict(X)
    close(pred.variance, oracle.predictive_variance(p.J, Sigma), 1e-8)
    close(pred.mean, p.f, 1e-14)
    naive = fit(net, (X, Y), likelihood, prior="single", model=model, evidence_at="trained")
    close(flat(naive.weights), p.theta, 0.0)
    assert grad(linear_loss(p, precision(naive), noise(naive, p)))(p.theta).norm() > 0.1


@cases.every()
def test_recommendation_1_gives_more_regularisation_and_less_variance(case):
    """ "The optima of M_θ⋆ corresponds to a larger λ than that of M_θ̃", and simple's to a larger one than full's.

    Not theorems: true of each of our networks for the simple model; for the full one of all but "bernoulli".
    """
    net, X, Y, likelihood = case.make()
    given = with_noise(likelihood)
    naive = fit(net, (X, Y), given, prior="single", evidence_at="trained")
    simple, full = (fit(net, (X, Y), given, prior="single", model=m) for m in ("linear", "affine"))
    assert simple.prior["all"] > full.prior["all"]
    assert simple.prior["all"] > naive.prior["all"]
    assert (full.prior["all"] > naive.prior["all"]) == (case.name != "bernoulli")
    assert (simple.predict(X).variance < naive.predict(X).variance).all()


@MODELS
@cases.every(cases.named("mlp-relu", "layer-norm", "weight-norm", "attention", "embedding"))
def test_recommendation_1_theta_star_has_no_part_that_the_data_do_not_see(case, model):
    """Λθ⋆ lies in the span of the features, of which Λθ̃ has a part outside: it counts in M_θ̃ and in no prediction."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="single", model=model)
    p = oracle.problem(net, X, Y, likelihood)
    values, vectors = torch.linalg.eigh(p.H(p.f, noise(post, p)))
    unseen = vectors[:, values < 1e-12 * values[-1]]
    assert unseen.shape[1] > 0
    weighted = precision(post) * flat(post.weights)
    assert (unseen.mT @ weighted).norm() < 1e-6 * weighted.norm()
    assert (unseen.mT @ p.theta).norm() > 0.05 * p.theta.norm()


# --- appendix: the simple model's mode lies further from θ̃ than the full one's


@cases.every()
def test_simple_mode_is_further_from_the_trained_weights(case):
    """Under one and the same Λ and σ; not a theorem, as "bernoulli" shows, but true of all our other networks."""
    net, X, Y, likelihood = case.make()
    naive = fit(net, (X, Y), likelihood, prior="single", evidence_at="trained")
    simple, full = (float((at_precision(case, m, naive) - weights_of(net)).norm()) for m in ("linear", "affine"))
    assert (simple > full) == (case.name != "bernoulli")


@cases.every(SMOOTH)
def test_simple_mode_is_further_from_weights_trained_to_the_end(case):
    """There the full model's mode is θ̃ itself, and the simple one's is not, for f ≠ Jθ̃."""
    net, X, Y, likelihood = case.make()
    Lambda = torch.full_like(weights_of(net), 0.3)
    train_to_the_end(net, X, oracle.problem(net, X, Y, likelihood), Lambda, HALF)
    simple, full = (
        (oracle.theta_star(oracle.problem(net, X, Y, likelihood, model=m), Lambda, HALF) - weights_of(net)).norm()
        for m in ("linear", "affine")
    )
    assert full < 1e-7
    assert simple > 0.1


@cases.every(GAUSSIAN)
def test_simple_and_full_modes_differ_by_what_the_offset_pulls(case):
    """θ⋆_simple − θ⋆_full = ΣJᵀW(f − Jθ̃): simple's is further if that is more than twice full's way from θ̃."""
    net, X, Y, likelihood = case.make()
    simple, full = (oracle.problem(net, X, Y, likelihood, model=m) for m in ("linear", "affine"))
    Lambda = torch.full_like(simple.theta, 0.3)
    ways = [oracle.theta_star(p, Lambda, HALF) - p.theta for p in (simple, full)]
    pull = oracle.covariance(full, Lambda, HALF) @ (full.J.flatten(0, -2).mT @ full.c.flatten()) / HALF**2
    close(ways[0] - ways[1], pull, 1e-8)
    assert ways[0].norm() >= pull.norm() - ways[1].norm()


def test_simple_mode_can_be_the_nearer_one():
    """Without biases a ReLU network of two layers has Jθ̃ = 2f: with targets 2f it is the full model that has to move."""
    build = sequential(partial(nn.Linear, 3, 6, bias=False), relu, partial(nn.Linear, 6, 1, bias=False))
    net, X, *_ = Case("homogeneous", "gaussian", build, normal(40, 3)).make()
    f, J = oracle.jacobian(net, X)
    close(J @ weights_of(net), 2 * f, 1e-12)
    simple, full = (oracle.problem(net, X, 2 * f, "gaussian", model=m) for m in ("linear", "affine"))
    Lambda = torch.full_like(simple.theta, 1e-3)
    near, far = ((oracle.theta_star(p, Lambda, HALF) - p.theta).norm() for p in (simple, full))
    assert near < 0.9 * far
