"""Posteriors of the cases as the library finds them, in the oracle's terms: one flat vector for all weights."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cases
import linlap as ll
import oracle
from linlap.errors import EvidenceWarning, InvarianceWarning

LIKELIHOODS = {
    "gaussian": ll.Gaussian(),
    "categorical": ll.Categorical(),
    "bernoulli": ll.Bernoulli(),
    "poisson": ll.Poisson(),
}
UNIT = torch.ones((), dtype=torch.float64)


def fit(net: nn.Module | ll.Linearised, data: Any, likelihood: str | ll.Gaussian, **options: Any) -> ll.Posterior:
    """`ll.fit` without a word about overconfident or normalised networks: some of the cases are."""
    named = LIKELIHOODS[likelihood] if isinstance(likelihood, str) else likelihood
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvidenceWarning)
        warnings.simplefilter("ignore", InvarianceWarning)
        return ll.fit(net, data, named, progress=False, **options)


def fit_case(case: cases.Case, **options: Any) -> ll.Posterior:
    net, X, Y, likelihood = case.make()
    return fit(net, (X, Y), options.pop("likelihood", likelihood), **options)


def flat(named: Mapping[str, Tensor]) -> Tensor:
    """Tensors by name as one vector [P]."""
    return torch.cat([tensor.flatten() for tensor in named.values()])


def precision(post: ll.Posterior) -> Tensor:
    """Λ [P]."""
    home = {name: post.prior[group] for group, names in post.groups.items() for name in names}
    return flat({name: torch.full_like(w, home[name]) for name, w in post.weights.items()})


def noise(post: ll.Posterior, p: oracle.Problem) -> Tensor:
    """σ in the oracle's shape."""
    return torch.as_tensor([] if post.noise is None else post.noise, dtype=torch.float64).reshape(p.noise_shape)


def prior_of(structure: str, net: nn.Module, p: oracle.Problem, sigma: Tensor = UNIT) -> oracle.Prior:
    """The oracle's prior of that structure; the group g-prior has one λ and its scales, taken at σ."""
    if structure == "curvature":
        scaled = oracle.g_prior(p, oracle.grouped(net, str), sigma)
        return oracle.Prior(torch.zeros_like(scaled.group), scaled.scale)
    return oracle.grouped(net, {"single": lambda _: "all", "tensor": str}[structure])


def close(actual: Any, expected: Any, rtol: float) -> None:
    """Equal to rtol of the largest number expected."""
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    assert_close(actual, expected, rtol=0.0, atol=rtol * largest + 1e-14)
