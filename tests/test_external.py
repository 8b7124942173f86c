"""Outside witnesses: scikit-learn's BayesianRidge and Gaussian process, and scipy's normal density.

The Jacobian of the trained network makes the features. The affine model h = f + J(θ − θ̃) is the linear one for targets
from which its offset c = f − Jθ̃ was taken off.
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import DotProduct
from sklearn.linear_model import BayesianRidge
from torch import nn

import cases
import oracle
from cases import Case, conv, linear, normal, relu, sequential, tanh
from fitted import close, fit, flat, precision
from linlap.curvature.dual import Dual
from linlap.problem import pose

MODELS = pytest.mark.parametrize("model", ["linear", "affine"])
BOTH = pytest.mark.parametrize("curvature", ["dense", "dual"])
GAUSSIAN = cases.with_likelihood("gaussian")
ONCE_EACH = pytest.mark.parametrize(("model", "curvature"), [("linear", "dense"), ("affine", "dual")])

# --- one group


@lru_cache
def ridge(case: Case, model: str) -> BayesianRidge:
    """With its four hyperpriors flat, no intercept, and stopped by a tiny tolerance only."""
    p = oracle.problem(*case.make(), model=model)
    flat_priors = dict.fromkeys(["alpha_1", "alpha_2", "lambda_1", "lambda_2"], 0.0)
    found = BayesianRidge(fit_intercept=False, compute_score=True, tol=1e-13, max_iter=20_000, **flat_priors)
    return found.fit(p.J.flatten(0, -2).numpy(), (p.Y - p.c).flatten().numpy())


@BOTH
@MODELS
@cases.every(GAUSSIAN)
def test_bayesian_ridge_finds_the_same(case, model, curvature):
    """λ, σ, log evidence, θ⋆ and Σ to 1e-8."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior="single", model=model, curvature=curvature)
    theirs = ridge(case, model)
    assert (post.curvature, post.status.converged) == (curvature, True)
    close(post.prior["all"], theirs.lambda_, 1e-8)
    close(post.noise**-2, theirs.alpha_, 1e-8)
    close(post.log_evidence, theirs.scores_[-1], 1e-8)
    close(flat(post.weights), theirs.coef_, 1e-8)
    close(post.factor.dense(), theirs.sigma_, 1e-8)


# --- several groups


@ONCE_EACH
@pytest.mark.parametrize("prior", ["curvature", "layer", "tensor"])
@cases.every([case for case in GAUSSIAN if case.name not in ("lstm", "gru")])
def test_log_evidence_is_the_density_of_a_gaussian_process(case, prior, model, curvature):
    """log N(y; c, σ²I + JΛ⁻¹Jᵀ) at the Λ and σ that were found, to 1e-10 of it."""
    net, X, Y, likelihood = case.make()
    post = fit(net, (X, Y), likelihood, prior=prior, model=model, curvature=curvature)
    p = oracle.problem(net, X, Y, likelihood, model=model)
    J = p.J.flatten(0, -2)
    K = (J / precision(post)) @ J.T + post.noise**2 * torch.eye(len(J), dtype=J.dtype)
    expected = multivariate_normal(p.c.flatten().numpy(), K.numpy()).logpdf(p.Y.flatten().numpy())
    close(post.log_evidence, expected, 1e-10)


@pytest.mark.parametrize(("prior", "model"), [("curvature", "linear"), ("layer", "affine")])
@cases.every(GAUSSIAN)
def test_gaussian_process_of_scikit_learn_predicts_the_same(case, prior, model):
    """With the kernel JΛ⁻¹Jᵀ: its log marginal likelihood, the linear mean and the joint covariance."""
    net, X, Y, likelihood = case.make()
    X, Y, unseen = X[:-3], Y[:-3], X[-3:]
    post = fit(net, (X, Y), likelihood, prior=prior, model=model)
    p, q = (oracle.problem(net, x, Y, likelihood, model=model) for x in (X, unseen))
    features, at = ((r.J.flatten(0, -2) * precision(post).rsqrt()).numpy() for r in (p, q))
    theirs = GaussianProcessRegressor(DotProduct(0.0, "fixed"), alpha=post.noise**2, optimizer=None)
    theirs.fit(features, (p.Y - p.c).flatten().numpy())
    mean, covariance = theirs.predict(at, return_cov=True)
    pred = post.predict(unseen, mean="linear")
    close(post.log_evidence, theirs.log_marginal_likelihood_value_, 1e-10)
    close(pred.mean.flatten(), torch.as_tensor(mean) + q.c.flatten(), 1e-8)
    close(pred.joint_cov.flatten(0, 1).flatten(1), covariance, 1e-8)


# --- dense equals dual on random networks


def random_case(seed: int, likelihood: str) -> Case:
    """Random widths, depth, activation, outputs and number of examples, images and vectors in turn."""
    draw = np.random.default_rng(seed)
    outputs, activation = int(draw.integers(2, 5)), [tanh, relu, nn.GELU][draw.integers(3)]
    if seed % 3 == 2:
        channels = int(draw.integers(1, 4))
        layers = [conv(1, channels), activation, nn.Flatten, linear(4 * channels, outputs)]
        inputs = (int(draw.integers(10, 40)), 1, 4, 4)
    else:
        widths = [int(w) for w in draw.integers(2, 7, size=draw.integers(2, 4))]
        layers = [part for pair in pairwise(widths) for part in (linear(*pair), activation)]
        layers += [linear(widths[-1], outputs)]
        inputs = (int(draw.integers(10, 60)), widths[0])
    return Case(f"random-{seed}", likelihood, sequential(*layers), normal(*inputs))


PRIORS = pytest.mark.parametrize("prior", ["curvature", "layer", "tensor"])
SEEDS = pytest.mark.parametrize("seed", range(4))


@PRIORS
@SEEDS
def test_dense_equals_dual_on_random_networks(seed, prior):
    """Evidence and variance to 1e-8, each searched for by itself."""
    net, X, Y, likelihood = random_case(seed, "gaussian").make()
    dense, dual = (fit(net, (X, Y), likelihood, prior=prior, curvature=c) for c in ("dense", "dual"))
    assert (dense.curvature, dual.curvature) == ("dense", "dual")
    close(dual.log_evidence, dense.log_evidence, 1e-8)
    close(dual.predict(X).variance, dense.predict(X).variance, 1e-8)


@PRIORS
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "poisson"])
@SEEDS
def test_dense_equals_dual_for_other_likelihoods_too(seed, likelihood, prior):
    """The evidence to 1e-8; the variance at one and the same Λ, which is only known to the search's tolerance."""
    net, X, Y, _ = random_case(seed, likelihood).make()
    dense, dual = (fit(net, (X, Y), likelihood, prior=prior, curvature=c) for c in ("dense", "dual"))
    close(dual.log_evidence, dense.log_evidence, 1e-8)
    problem = pose(dense.linearised, (X, Y), dense.likelihood, "linear", 2**30)
    factor = Dual().of(problem, problem.network_outputs).factor(dense.setting.prior, dense.setting.noise_precision)
    J = dense.linearised.jacobian(X)
    close(factor.variance(J), dense.factor.variance(J), 1e-8)
