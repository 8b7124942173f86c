"""How good are the predictions: the posterior and, beside it, the plain network, on the same data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linlap.calibration import weights_of
from linlap.data import collect
from linlap.errors import InputError
from linlap.likelihood import Bernoulli, Categorical, Gaussian
from linlap.posterior import Calibration, Posterior, inputs_of
from linlap.predictive import Moments, Predictive
from linlap.state import random_state_kept
from linlap.targets import Targets

LEVELS = (0.5, 0.9)
BINS = 15
CALIBRATE = (
    "only held-out data can tell how far to trust it, above all where the network has memorised its training set; pass "
    "held_out= to fit"
)
OTHER_DATA = "its scales were learnt on held-out data already, so these data may be of another kind than those"
METHODS = ("posterior", "posterior, linear mean", "network")


@dataclass(frozen=True)
class Evaluation:
    """Scores of each method, `scores[method][metric]`: nll (nats an example, lower is better) first.

    Methods are `"posterior"` (about the network's own output), `"posterior, linear mean"` and `"network"`, the plain
    network (with the noise of maximum likelihood for regression).
    """

    scores: dict[str, dict[str, float]]
    examples: int
    warnings: tuple[str, ...] = ()

    @property
    def posterior(self) -> dict[str, float]:
        """Of the posterior about the network's own output."""
        return self.scores["posterior"]

    @property
    def network(self) -> dict[str, float]:
        """Of the plain network."""
        return self.scores["network"]

    def __getitem__(self, metric: str) -> float:
        return self.posterior[metric]

    def __str__(self) -> str:
        metrics = list(dict.fromkeys(metric for row in self.scores.values() for metric in row))
        width = max(map(len, self.scores))
        lines = [" " * width + "".join(f"  {metric:>11}" for metric in metrics)]
        for method, row in self.scores.items():
            cells = "".join(f"  {row[m]:>11.4f}" if m in row else f"  {'–':>11}" for m in metrics)
            lines.append(f"{method:<{width}}{cells}")
        return "\n".join([*lines, f"({self.examples:,} examples)", *(f"warning: {w}" for w in self.warnings)])


def evaluate(post: Posterior, data: Any, unfamiliar: Any = None) -> Evaluation:
    """Score a posterior on data, with the plain network beside it.

    Args:
        post: the posterior.
        data: batches `(x, y)` or `(x, y, weights)`, or one pair `(X, Y)`; weights weigh the examples in every mean.
        unfamiliar: inputs of another kind (a loader, or what the network takes): adds how well the predictive entropy
            and the epistemic score tell them from the data's, as areas under the ROC curve.

    Example:
        >>> import linlap as ll, torch
        >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
        >>> post = ll.fit(torch.nn.Linear(1, 1), (x, 3 * x), "regression", progress=False)
        >>> round(ll.evaluate(post, (x, 3 * x)).posterior["coverage 90 %"], 2) >= 0.8
        True
    """
    with random_state_kept():
        held = collect(data, post.network.device)
        others = [] if unfamiliar is None else list(inputs_of(unfamiliar))
    targets = [post.likelihood.targets(b.targets, b.weights, post.output_shape) for b in held]
    parts = [_predicted(post, batch.inputs) for batch in held]
    known = {method: [part[method] for part in parts] for method in METHODS}
    log_probs = {
        method: torch.cat([p.log_prob(b.targets) for p, b in zip(known[method], held, strict=True)])
        for method in METHODS
    }
    weight = torch.cat([weights_of(batch) for batch in held])
    scores = {m: {"nll": -float(_mean(log_probs[m], weight))} | _scores(known[m], targets) for m in METHODS}
    if unfamiliar is not None:
        other = [_predicted(post, part) for part in others]
        for method in METHODS:
            scores[method] |= _separation(known[method], [part[method] for part in other])
    advice = CALIBRATE if post.calibration == Calibration() else OTHER_DATA
    warned = _warned(log_probs["network"] - log_probs["posterior"], weight, advice)
    return Evaluation(scores, sum(map(len, held)), warned)


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    """Of numbers with weights of their shape."""
    return (weight * values.double()).sum() / weight.sum()


def _predicted(post: Posterior, inputs: Any) -> dict[str, Predictive]:
    own, linear = post.predict(inputs), post.predict(inputs, mean="linear")
    nothing = torch.zeros_like(own.mean.flatten(1))
    moments = Moments(
        lambda: nothing,
        lambda: torch.diag_embed(nothing),
        lambda: torch.zeros(*nothing.shape, *nothing.shape, dtype=nothing.dtype),
    )
    noise = None
    if post.noises is not None:
        noise = post.noises.plain.sqrt().expand(nothing.shape[1]).reshape(post.output_shape).to(own.mean.dtype)
    plain = Predictive(own.mean, noise, post.likelihood, moments, post.reference)
    return dict(zip(METHODS, (own, linear, plain), strict=True))


def _scores(parts: list[Predictive], targets: list[Targets]) -> dict[str, float]:
    """The metrics of one method beside its negative log likelihood."""
    likelihood = parts[0].likelihood
    if isinstance(likelihood, Gaussian):
        return _regression(parts, targets)
    if isinstance(likelihood, Categorical | Bernoulli):
        return _classification(likelihood, parts, targets)
    error = torch.cat([p.mean.flatten(1).double().exp() - t.values for p, t in zip(parts, targets, strict=True)])
    weight = torch.cat([t.weight for t in targets]).expand_as(error)
    return {"rmse": float(_mean(error**2, weight).sqrt())}


def _regression(parts: list[Predictive], targets: list[Targets]) -> dict[str, float]:
    """Error, coverage of the central intervals, and their sharpness (mean standard deviation)."""
    y = torch.cat([t.values for t in targets])
    mean = torch.cat([p.mean.flatten(1).double() for p in parts])
    std = torch.cat([p.std.flatten(1).double() for p in parts])
    weight = torch.cat([t.weight for t in targets]).expand_as(y)
    scores = {"rmse": float(_mean((y - mean) ** 2, weight).sqrt())}
    for level in LEVELS:
        half = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
        inside = ((y - mean).abs() <= half * std).double()
        scores[f"coverage {level:.0%}".replace("%", " %")] = float(_mean(inside, weight))
    return scores | {"sharpness": float(_mean(std, weight))}


def _classification(
    likelihood: Categorical | Bernoulli, parts: list[Predictive], targets: list[Targets]
) -> dict[str, float]:
    """Accuracy, expected calibration error of the most probable class, Brier score."""
    probabilities = torch.cat([p.probs().flatten(1).double() for p in parts])
    values, weight = torch.cat([t.values for t in targets]), torch.cat([t.weight for t in targets])
    if isinstance(likelihood, Bernoulli):
        p, y = torch.stack([1 - probabilities, probabilities], -1), values.round().long()
    else:
        p, y = likelihood.sites(probabilities), values
    weight = weight.expand_as(y)
    confidence, guess = p.max(-1)
    right = (guess == y).double()
    one_hot = torch.nn.functional.one_hot(y, p.shape[-1])
    return {
        "accuracy": float(_mean(right, weight)),
        "ece": calibration_error(confidence, right, weight),
        "brier": float(_mean(((p - one_hot) ** 2).sum(-1), weight)),
    }


def calibration_error(confidence: Tensor, right: Tensor, weight: Tensor) -> float:
    """|confidence − accuracy| averaged over equal-width bins of the confidence."""
    bins = (confidence * BINS).long().clamp(max=BINS - 1).flatten()
    gaps = torch.zeros(BINS, dtype=torch.float64, device=bins.device)
    gaps = gaps.index_add(0, bins, (weight * (confidence - right)).flatten())
    return float(gaps.abs().sum() / weight.sum())


def _separation(known: list[Predictive], other: list[Predictive]) -> dict[str, float]:
    """Areas under the ROC curve for telling unfamiliar inputs apart."""
    scores = {}
    if isinstance(known[0].likelihood, Categorical | Bernoulli):
        scores["auroc entropy"] = auroc(*(torch.cat([_entropy(p) for p in parts]) for parts in (known, other)))
    if any(bool(p.epistemic_score.any()) for p in known):
        pair = (torch.cat([p.epistemic_score for p in parts]) for parts in (known, other))
        scores["auroc epistemic"] = auroc(*pair)
    return scores


def _entropy(predictive: Predictive) -> Tensor:
    """Entropy of each example's labels, as if they were independent `[n]`."""
    p = predictive.probs().double()
    terms = torch.special.entr(p)
    if isinstance(predictive.likelihood, Bernoulli):
        terms = terms + torch.special.entr(1 - p)
    return terms.flatten(1).sum(1)


def auroc(familiar: Tensor, unfamiliar: Tensor) -> float:
    """The probability that an unfamiliar input scores higher than a familiar one, ties half."""
    ordered = familiar.double().sort().values
    above = torch.searchsorted(ordered, unfamiliar.double())
    up_to = torch.searchsorted(ordered, unfamiliar.double(), right=True)
    return float((above + up_to).double().mean() / 2 / len(ordered))


def _warned(losses: Tensor, weight: Tensor, advice: str) -> tuple[str, ...]:
    """Where the posterior loses to the plain network by more than a paired standard error, say so; `losses` `[n]` in nats."""
    worse, n = _mean(losses, weight), len(losses)
    if n < 2:
        return ()
    error = (weight**2 * (losses.double() - worse) ** 2).sum().sqrt() / weight.sum() * math.sqrt(n / (n - 1))
    if worse <= error:
        return ()
    return (
        f"the posterior's negative log likelihood is {float(worse):.3g} ± {float(error):.1g} nats an example higher than the "
        f"plain network's on these data: {advice}",
    )


@dataclass(frozen=True)
class Comparison:
    """Posteriors in the order of their evidence, best first."""

    posteriors: dict[str, Posterior]

    @property
    def best(self) -> str:
        """The name with the highest evidence."""
        return next(iter(self.posteriors))

    def undecided(self, name: str) -> bool:
        """Is its evidence within two standard errors of the best one's?"""
        best, other = self.posteriors[self.best], self.posteriors[name]
        error = math.hypot(best.log_evidence_error, other.log_evidence_error)
        return name != self.best and best.log_evidence - other.log_evidence < 2 * error

    def __str__(self) -> str:
        width = max(map(len, self.posteriors))
        top = self.posteriors[self.best].log_evidence
        lines = [f"{'':<{width}}  {'log evidence':>13}  {'below best':>10}  {'determined':>10}"]
        for name, post in self.posteriors.items():
            determined = sum(post.effective_dimensions.values())
            mark = "  undecided" if self.undecided(name) else "" if post.status.converged else "  not converged"
            lines.append(
                f"{name:<{width}}  {post.log_evidence:>13.3f}  {top - post.log_evidence:>10.3f}  {determined:>10.1f}{mark}"
            )
        return "\n".join(lines)


def compare(posteriors: Mapping[str, Posterior]) -> Comparison:
    """Order posteriors of the same data by their evidence.

    Example:
        >>> import linlap as ll, torch
        >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
        >>> one, two = (ll.fit(torch.nn.Linear(1, 1, bias=b), (x, 3 * x + 1), "regression", progress=False)
        ...             for b in (True, False))
        >>> ll.compare({"bias": one, "no bias": two}).best
        'bias'
    """
    if not isinstance(posteriors, Mapping) or not all(isinstance(p, Posterior) for p in posteriors.values()):
        raise InputError(
            f"compare takes posteriors by name, but it got a {type(posteriors).__name__}: pass {{name: posterior, …}}"
        )
    if not posteriors:
        raise InputError("compare needs at least one posterior, but it got none: pass {name: posterior, …}")
    kinds = {(post.examples, post.likelihood.name) for post in posteriors.values()}
    if len(kinds) > 1:
        raise InputError(
            f"evidences compare only for the same data and likelihood, but these differ: {sorted(kinds)}: fit all of them to the "
            "same data"
        )
    ordered = sorted(posteriors.items(), key=lambda item: -item[1].log_evidence)
    return Comparison(dict(ordered))
