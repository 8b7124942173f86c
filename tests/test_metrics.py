"""Scores against scikit-learn and their definitions, the plain network's beside them; comparison by the evidence."""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as reference
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import cases
import linlap as ll
import oracle
from fitted import close, fit, fit_case
from linlap.errors import InputError
from linlap.metrics import auroc, calibration_error
from linlap.posterior import Calibration

METHODS = pytest.mark.parametrize("method", ["posterior", "posterior, linear mean", "network"])
fitted = lru_cache(fit_case)


@lru_cache
def scored(name: str, **options) -> tuple[ll.Posterior, ll.Evaluation, Tensor, Tensor]:
    """A posterior, its scores on data of the same kind, and these."""
    _, X, Y, _ = cases.CASES[name].make()
    post = fitted(cases.CASES[name], **options)
    data = 1.2 * X, Y.roll(1, 0)
    return post, ll.evaluate(post, data), *data


def moments(post: ll.Posterior, method: str, X: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean, epistemic variance and noise of each method."""
    if method == "network":
        predicted = post.predict(X)
        plain = None if post.noises is None else post.noises.plain.sqrt()
        return predicted.mean, torch.zeros_like(predicted.mean), plain
    predicted = post.predict(X, mean="linear" if method.endswith("linear mean") else "network")
    return predicted.mean, predicted.variance, predicted.noise_std


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray, weight: np.ndarray) -> float:
    """Over fifteen bins of equal width."""
    total = 0.0
    for low in np.arange(15) / 15:
        here = (confidence >= low) & (confidence < low + 1 / 15 + (low > 0.9))
        if here.any():
            gap = np.average(confidence[here], weights=weight[here]) - np.average(right[here], weights=weight[here])
            total += weight[here].sum() / weight.sum() * abs(gap)
    return total


# --- each metric


@METHODS
def test_regression(method):
    """Gaussian log density, error, coverage and mean width; the plain network has the noise of maximum likelihood."""
    post, found, X, Y = scored("mlp")
    mean, variance, sigma = moments(post, method, X)
    std = (variance + sigma**2).sqrt()
    scores, normal = found.scores[method], stats.norm(mean.numpy(), std.numpy())
    assert list(scores) == ["nll", "rmse", "coverage 50 %", "coverage 90 %", "sharpness"]
    close(scores["nll"], -normal.logpdf(Y.numpy()).mean(), 1e-12)
    close(scores["rmse"], reference.root_mean_squared_error(Y, mean), 1e-12)
    for level in (0.5, 0.9):
        low, high = normal.interval(level)
        assert scores[f"coverage {level:.0%}".replace("%", " %")] == np.mean((Y.numpy() >= low) & (Y.numpy() <= high))
    close(scores["sharpness"], std.mean(), 1e-12)


def test_the_plain_network_has_the_noise_of_maximum_likelihood_on_its_training_data():
    net, X, Y, _ = cases.CASES["mlp"].make()
    with torch.no_grad():
        sigma = float(((net(X) - Y) ** 2).mean().sqrt())
    found = ll.evaluate(fitted(cases.CASES["mlp"]), (X, Y))
    close(found.network["sharpness"], sigma, 1e-12)
    close(found.network["nll"], 0.5 + 0.5 * math.log(2 * math.pi * sigma**2), 1e-12)


@METHODS
def test_regression_takes_the_outputs_of_an_example_jointly(method):
    post, found, X, Y = scored("mlp-two-outputs")
    if method == "network":
        normals = [(m, post.noises.plain.expand(2).diag()) for m in post.predict(X).mean]
    else:
        predicted = post.predict(X, mean="linear" if method.endswith("linear mean") else "network")
        normals = zip(predicted.mean, predicted.cov + (predicted.noise_std**2).diag(), strict=True)
    densities = [
        stats.multivariate_normal(m.numpy(), c.numpy()).logpdf(y) for (m, c), y in zip(normals, Y, strict=True)
    ]
    close(found.scores[method]["nll"], -np.mean(densities), 1e-10)


@METHODS
def test_classification(method):
    post, found, X, Y = scored("mlp-classes")
    mean, variance, _ = moments(post, method, X)
    p, y = oracle.probit("categorical", mean, variance).numpy(), Y.numpy()
    scores, right = found.scores[method], p.argmax(1) == y
    assert list(scores) == ["nll", "accuracy", "ece", "brier"]
    close(scores["nll"], reference.log_loss(y, p, labels=range(3)), 1e-12)
    close(scores["accuracy"], reference.accuracy_score(y, p.argmax(1)), 1e-14)
    close(scores["ece"], expected_calibration_error(p.max(1), right, np.ones(len(y))), 1e-12)
    close(scores["brier"], ((p - np.eye(3)[y]) ** 2).sum(1).mean(), 1e-12)


@METHODS
def test_labels_of_several_outputs_are_binary_each(method):
    """Log losses of an example add up; the other scores are those of all labels, the Brier score over both answers."""
    post, found, X, Y = scored("bernoulli")
    mean, variance, _ = moments(post, method, X)
    p, y = oracle.probit("bernoulli", mean, variance).flatten().numpy(), Y.flatten().numpy()
    scores = found.scores[method]
    close(scores["nll"], 3 * reference.log_loss(y, p), 1e-12)
    close(scores["accuracy"], reference.accuracy_score(y, p > 0.5), 1e-14)
    close(scores["brier"], 2 * reference.brier_score_loss(y, p), 1e-12)
    confidence = np.maximum(p, 1 - p)
    close(scores["ece"], expected_calibration_error(confidence, (p > 0.5) == y, np.ones(len(y))), 1e-12)


@METHODS
def test_counts(method):
    post, found, X, Y = scored("poisson")
    mean, _, _ = moments(post, method, X)
    scores = found.scores[method]
    assert list(scores) == ["nll", "rmse"]
    close(scores["rmse"], reference.root_mean_squared_error(Y, mean.exp()), 1e-12)
    if method == "network":
        close(scores["nll"], -stats.poisson.logpmf(Y.numpy(), mean.exp().numpy()).mean(), 1e-10)
    else:
        predicted = post.predict(X, mean="linear" if method.endswith("linear mean") else "network")
        close(scores["nll"], -predicted.log_prob(Y).mean(), 1e-12)


def test_every_place_counts_but_the_ignored_ones():
    post, _, X, Y = scored("image-classes")
    hidden = torch.rand(Y.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    found = ll.evaluate(post, (X, Y.masked_fill(hidden, -100)))
    p = post.predict(X).probs().movedim(1, -1)[~hidden].numpy()
    y = Y[~hidden].numpy()
    close(found["nll"], reference.log_loss(y, p, labels=range(3)) * len(y) / len(X), 1e-12)
    close(found["accuracy"], reference.accuracy_score(y, p.argmax(1)), 1e-14)
    close(found["ece"], expected_calibration_error(p.max(1), p.argmax(1) == y, np.ones(len(y))), 1e-12)
    close(found["brier"], ((p - np.eye(3)[y]) ** 2).sum(1).mean(), 1e-12)


@cases.every(cases.named("mlp", "mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image-classes"))
def test_weights_of_examples_count_like_repeated_rows(case):
    post, _, X, Y = scored(case.name)
    weight = torch.arange(len(X)) % 3
    weighted = ll.evaluate(post, [(X, Y, weight.double())])
    repeated = ll.evaluate(post, (X.repeat_interleave(weight, 0), Y.repeat_interleave(weight, 0)))
    for method, scores in repeated.scores.items():
        close(list(weighted.scores[method].values()), list(scores.values()), 1e-10)


@cases.every(cases.named("mlp", "mlp-classes"))
def test_a_loader_scores_like_its_tensors(case):
    post, whole, X, Y = scored(case.name)
    found = ll.evaluate(post, DataLoader(TensorDataset(X, Y), batch_size=7))
    assert found.examples == whole.examples == len(X)
    for method, scores in whole.scores.items():
        close(list(found.scores[method].values()), list(scores.values()), 1e-12)


@pytest.mark.parametrize("bins", [[0.0, 1.0], [0.2, 0.2, 0.9, 1.0], [1 / 3, 0.5, 2 / 3]])
def test_calibration_error_by_hand(bins):
    confidence = torch.tensor(bins, dtype=torch.float64)
    right, weight = (torch.arange(len(bins)) % 2).double(), torch.arange(1, len(bins) + 1).double()
    expected = expected_calibration_error(confidence.numpy(), right.numpy(), weight.numpy())
    close(calibration_error(confidence, right, weight), expected, 1e-12)


# --- telling unfamiliar inputs apart


def test_auroc_is_that_of_scikit_learn_ties_included():
    generator = torch.Generator().manual_seed(0)
    familiar, other = (torch.randint(high, (n,), generator=generator) / 7 for high, n in ((20, 57), (30, 31)))
    truth = np.r_[np.zeros(57), np.ones(31)]
    close(auroc(familiar, other), reference.roc_auc_score(truth, torch.cat([familiar, other])), 1e-14)
    assert auroc(torch.tensor([0.0, 1.0]), torch.tensor([2.0])) == 1
    assert auroc(torch.ones(3), torch.ones(4)) == 0.5


@METHODS
@cases.every(cases.named("mlp-classes", "bernoulli"))
def test_unfamiliar_inputs_by_entropy_and_by_epistemic_score(case, method):
    post, _, X, Y = scored(case.name)
    strange = 3 * X[:11] + 1
    found = ll.evaluate(post, (X, Y), unfamiliar=list(strange.split(4))).scores[method]
    both = torch.cat([X, strange])
    mean, variance, _ = moments(post, method, both)
    p = oracle.probit(case.likelihood, mean, variance).numpy()
    entropy = stats.entropy(p, axis=1) if case.likelihood == "categorical" else stats.bernoulli(p).entropy().sum(1)
    truth = np.r_[np.zeros(len(X)), np.ones(11)]
    close(found["auroc entropy"], reference.roc_auc_score(truth, entropy), 1e-12)
    assert ("auroc epistemic" in found) == (method != "network")
    if method != "network":
        close(found["auroc epistemic"], reference.roc_auc_score(truth, variance.sum(1)), 1e-12)


def test_a_regression_has_no_entropy_to_tell_by():
    post, _, X, Y = scored("mlp")
    found = ll.evaluate(post, (X, Y), unfamiliar=10 * X)
    assert found["auroc epistemic"] > 0.9
    assert not any("entropy" in metric for metric in found.posterior)


# --- a posterior that is worse than the plain network


def careless(name: str, variance: float, noise: float) -> ll.Posterior:
    """A posterior with scales that are far too large."""
    by_mean = [dict.fromkeys(("network", "linear"), scale) for scale in (variance, noise)]
    post = fitted(cases.CASES[name])
    return post.calibrated(Calibration(*by_mean), post.reference)


def test_losing_to_the_plain_network_is_warned_about():
    """By more than one paired standard error, which is said."""
    case = cases.CASES["mlp-classes"]
    net, X, Y, likelihood = case.make()
    net[-1].weight.data.mul_(3)
    with torch.no_grad():
        Y = net(X).argmax(1)  # the network is right about everything, and sure
    post = fit(net, (X, Y), likelihood)
    found = ll.evaluate(post, (X, Y))
    losses = post.predict(X).log_prob(Y) + torch.nn.functional.cross_entropy(net(X).detach(), Y, reduction="none")
    worse, error = float(-losses.mean()), float(losses.std()) / math.sqrt(len(X))
    assert worse > error
    (warning,) = found.warnings
    assert f"is {worse:.3g} ± {error:.1g} nats an example higher than the plain network's on these data" in warning
    assert "memorised its training set; pass held_out= to fit" in warning
    assert f"warning: {warning}" in str(found)


def test_a_posterior_with_held_out_scales_gets_other_advice():
    post = careless("mlp-classes", 1e4, 1.0)
    _, X, Y, _ = cases.CASES["mlp-classes"].make()
    (warning,) = ll.evaluate(post, (X, Y)).warnings
    assert "its scales were learnt on held-out data already" in warning
    assert "pass held_out=" not in warning


def test_no_warning_without_a_loss_or_without_examples_to_tell():
    _, better, X, _ = scored("mlp")
    assert better["nll"] < better.network["nll"]
    assert better.warnings == ()
    assert ll.evaluate(careless("mlp", 1e4, 1e4), (X[:1], X[:1, :1])).warnings == ()


# --- as text


def test_the_table_has_a_row_for_each_method():
    post, _, X, Y = scored("mlp-classes")
    found = ll.evaluate(post, (X, Y), unfamiliar=3 * X)
    head, *rows = str(found).splitlines()
    assert head.split("  ")[-1] == "auroc epistemic"
    assert [row.split("  ")[0] for row in rows[:3]] == list(found.scores)
    assert rows[2].endswith("–")
    assert f"{found['nll']:.4f}" in rows[0]
    assert rows[3] == f"({len(X)} examples)"
    assert found.posterior is found.scores["posterior"]
    assert found.network is found.scores["network"]


# --- comparison by the evidence


def with_evidence(value: float, error: float = 0.0, **changes) -> ll.Posterior:
    return replace(fitted(cases.CASES["mlp"]), log_evidence=value, log_evidence_error=error, **changes)


def test_the_highest_evidence_comes_first():
    compared = ll.compare({"b": with_evidence(-3), "c": with_evidence(-10), "a": with_evidence(-1)})
    assert list(compared.posteriors) == ["a", "b", "c"]
    assert compared.best == "a"
    assert not any(map(compared.undecided, "abc"))


@pytest.mark.parametrize(("errors", "undecided"), [((0.3, 0.4), True), ((0.3, 0.39), False), ((0.0, 0.6), True)])
def test_differences_under_two_standard_errors_are_undecided(errors, undecided):
    compared = ll.compare({"a": with_evidence(0, errors[0]), "b": with_evidence(-0.99, errors[1])})
    assert compared.undecided("b") == undecided
    assert not compared.undecided("a")
    assert ("undecided" in str(compared)) == undecided


def test_a_comparison_as_text():
    stopped = replace(fitted(cases.CASES["mlp"]).status, converged=False)
    head, first, second = str(
        ll.compare({"one": with_evidence(-3), "two": with_evidence(-4.5, status=stopped)})
    ).splitlines()
    assert head.split("  ")[-3:] == ["log evidence", "below best", "determined"]
    assert first.split()[:3] == ["one", "-3.000", "0.000"]
    assert second.split()[:3] == ["two", "-4.500", "1.500"]
    assert second.endswith("not converged")


def test_only_what_was_fitted_to_the_same_data_is_compared():
    with pytest.raises(
        InputError, match=r"compare needs at least one posterior, but it got none: pass {name: posterior"
    ):
        ll.compare({})
    both = {"a": fitted(cases.CASES["mlp"]), "b": fitted(cases.CASES["mlp-classes"])}
    with pytest.raises(
        InputError, match=r"same data and likelihood, but these differ: .*30, 'categorical'.* fit all of"
    ):
        ll.compare(both)
