"""What a posterior predicts, against its definitions: the mean, whose noise it is, the covariance, and what is made of them."""

import math
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cases
import linlap as ll
import oracle
from fitted import close, fit, fit_case, flat, noise, precision
from linlap.errors import DataError, InputError
from linlap.predictive import Moments, Predictive, poisson_mixture

BOTH = pytest.mark.parametrize("curvature", ["dense", "dual"])
MEANS = pytest.mark.parametrize("mean", ["network", "linear"])
GAUSSIAN = cases.with_likelihood("gaussian")
ONE_EACH = cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image", "image-classes")
CLASSES = cases.named("mlp-classes", "bernoulli", "image-classes")
DRAWS = 40_000

fitted = lru_cache(fit_case)


@lru_cache
def brute_force(case: cases.Case, curvature: str = "auto") -> tuple[Tensor, Tensor]:
    """J [n, *c, P] of all inputs and Σ = (H + Λ)⁻¹, from their definitions."""
    net, X, Y, likelihood = case.make()
    post, p = fitted(case, curvature=curvature), oracle.problem(net, X, Y, likelihood)
    return p.J, oracle.covariance(p, precision(post), noise(post, p))


def predictive(
    mean: Tensor, cov: Tensor, likelihood: ll.Gaussian | ll.Poisson | ll.Bernoulli | ll.Categorical, sigma=None
) -> Predictive:
    """A prediction with that mean `[n, ...]` and covariance `[n, C, C]`."""
    moments = Moments(lambda: cov.diagonal(dim1=1, dim2=2), lambda: cov, lambda: torch.empty(0))
    return Predictive(mean, sigma, likelihood, moments, torch.arange(10.0))


def mean_outputs(net: nn.Module, X: Tensor) -> Tensor:
    with torch.no_grad():
        return net.eval()(X)


def standard_errors(drawn: Tensor, expected: Tensor) -> float:
    """The largest distance of the mean over the first axis from what is expected, in its standard errors."""
    errors = drawn.std(0) / math.sqrt(len(drawn))
    return float(((drawn.mean(0) - expected).abs() / errors).max())


# --- the mean


@cases.every()
def test_the_mean_is_the_networks_own_output_bit_for_bit(case):
    net, X, _, _ = case.make()
    predicted = fitted(case).predict(X)
    assert torch.equal(predicted.mean, mean_outputs(net, X))
    assert len(predicted) == len(X)


def test_the_mean_stays_that_of_the_network_that_was_fitted():
    """In training mode, with dropout, and trained further afterwards: the mean is that of the fitted weights in eval mode."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    X = torch.randn(20, 3)
    post = fit(net, (X, X[:, :2].sin()), "gaussian")
    expected = mean_outputs(net, X)
    with torch.no_grad():
        for parameter in net.train().parameters():
            parameter.add_(1)
    predicted = post.predict(X)
    assert torch.equal(predicted.mean, expected)
    assert predicted.mean.dtype == predicted.std.dtype == torch.float32
    assert net.training


@pytest.mark.parametrize("model", ["linear", "affine"])
@cases.every(cases.named("mlp", "image", "mlp-classes"))
def test_the_linear_mean_is_that_of_the_linear_model(case, model):
    """h = Jθ⋆, or f + J (θ⋆ − θ̃): the covariance is the same about either mean."""
    net, X, Y, likelihood = case.make()
    post, p = fitted(case, model=model), oracle.problem(net, X, Y, likelihood, model)
    linear, own = post.predict(X, mean="linear"), post.predict(X)
    close(linear.mean, p.outputs(flat(post.weights)), 1e-12)
    assert torch.equal(linear.cov, own.cov)


# --- the noise belongs to the mean


@cases.every(GAUSSIAN)
def test_noise_about_the_network_is_that_of_the_evidence_and_the_excess_of_its_residuals(case):
    """σ_f² = σ² + max(0, RSS_f − RSS_h)/N."""
    net, X, Y, _ = case.make()
    post, p = fitted(case), oracle.problem(net, X, Y, "gaussian")
    squares = [float(((Y - o) ** 2).sum()) for o in (p.f, p.outputs(flat(post.weights)))]
    variance = post.noise**2 + max(0.0, squares[0] - squares[1]) / Y.numel()
    close(post.predict(X).noise_std, torch.full(Y.shape[1:], variance, dtype=Y.dtype).sqrt(), 1e-10)
    close(post.predict(X, mean="linear").noise_std, torch.full(Y.shape[1:], post.noise, dtype=Y.dtype), 1e-14)


def test_both_branches_of_that_noise_occur_among_the_cases():
    """The linear model fits better than some networks and worse than others, or the test above would miss a branch."""
    excess = set()
    for case in GAUSSIAN:
        net, X, Y, _ = case.make()
        p = oracle.problem(net, X, Y, "gaussian")
        h = p.outputs(flat(fitted(case).weights))
        excess.add(bool(((Y - p.f) ** 2).sum() > ((Y - h) ** 2).sum()))
    assert excess == {True, False}


@BOTH
def test_noise_of_each_output_has_the_excess_of_its_own_residuals(curvature):
    net, X, Y, _ = cases.CASES["mlp-two-outputs"].make()
    post = fit(net, (X, Y), ll.Gaussian(per_output=True), curvature=curvature)
    p = oracle.problem(net, X, Y, "gaussian")
    squares = [((Y - o) ** 2).sum(0) for o in (p.f, p.outputs(flat(post.weights)))]
    close(post.predict(X).noise_std, (post.noise**2 + (squares[0] - squares[1]).clamp(min=0) / len(X)).sqrt(), 1e-10)


@pytest.mark.parametrize("given", [0.4, [0.3, 0.6]])
@BOTH
def test_where_the_noise_is_given_the_networks_own_is_off_the_optimum(given, curvature):
    """σ_f² = (RSS_f + σ²γ)/N, with σ²γ the predictive variances summed over the data."""
    net, X, Y, _ = cases.CASES["mlp-two-outputs"].make()
    sigma = torch.tensor(given, dtype=torch.float64)
    post = fit(net, (X, Y), ll.Gaussian(noise=sigma), curvature=curvature)
    p = oracle.problem(net, X, Y, "gaussian", noise_shape=tuple(sigma.shape))
    Sigma = oracle.covariance(p, precision(post), sigma)
    sums = ((Y - p.f) ** 2 + oracle.predictive_variance(p.J, Sigma)).sum(0)
    own = sums / len(X) if sigma.ndim else sums.sum().expand(2) / Y.numel()
    close(post.predict(X).noise_std, own.sqrt(), 1e-10)
    close(post.predict(X, mean="linear").noise_std, sigma.expand(2), 1e-14)


def test_the_naive_method_has_one_noise():
    post = fitted(cases.CASES["mlp"], evidence_at="trained")
    X = cases.CASES["mlp"].make()[1]
    assert float(post.predict(X).noise_std) == float(post.predict(X, mean="linear").noise_std) == post.noise


@cases.every(cases.with_likelihood("categorical", "bernoulli", "poisson")[:4])
def test_there_is_no_noise_beside_labels_and_counts(case):
    predicted = fitted(case).predict(case.make()[1])
    assert predicted.noise_std is None
    assert torch.equal(predicted.std, predicted.epistemic_std)


# --- covariance and standard deviations


@BOTH
@cases.every(ONE_EACH)
def test_second_moments_are_those_of_the_features(case, curvature):
    """JΣJᵀ within and between examples; the standard deviation is its root, with the noise's variance for regression."""
    _, X, _, _ = case.make()
    predicted = fitted(case, curvature=curvature).predict(X[:4])
    J, Sigma = brute_force(case, curvature)
    J = J[:4]
    variance = oracle.predictive_variance(J, Sigma)
    joint = torch.einsum("iap,pq,jbq->iajb", J.flatten(1, -2), Sigma, J.flatten(1, -2))
    close(predicted.variance, variance, 1e-8)
    close(predicted.cov, oracle.predictive_covariance(J, Sigma), 1e-8)
    close(predicted.joint_cov, joint, 1e-8)
    close(predicted.epistemic_std, variance.sqrt(), 1e-8)
    close(predicted.epistemic_score, variance.flatten(1).sum(1), 1e-8)
    sigma = 0 if predicted.noise_std is None else predicted.noise_std
    close(predicted.std, (variance + sigma**2).sqrt(), 1e-8)


@cases.every(cases.named("image", "image-classes"))
def test_dense_outputs_keep_their_shape(case):
    _, X, _, _ = case.make()
    predicted = fitted(case).predict(X[:3])
    shape, numbers = predicted.mean.shape, predicted.mean[0].numel()
    assert len(shape) == 4
    for image in (predicted.std, predicted.epistemic_std, predicted.variance, predicted.sample(2)[1]):
        assert image.shape == shape
    assert predicted.cov.shape == (3, numbers, numbers)
    assert predicted.joint_cov.shape == (3, numbers, 3, numbers)
    if predicted.noise_std is None:
        assert predicted.probs().shape == predicted.probs("mc", 10).shape == shape
    else:
        assert predicted.noise_std.shape == shape[1:]
        assert all(bound.shape == shape for bound in predicted.interval())


@MEANS
@cases.every(cases.named("mlp-two-outputs", "mlp-classes", "image"))
def test_draws_of_the_outputs_have_the_mean_and_the_covariance(case, mean):
    """Each within five standard errors."""
    _, X, _, _ = case.make()
    predicted = fitted(case).predict(X[:3], mean=mean)
    drawn = predicted.sample(DRAWS if predicted.mean.ndim == 2 else 4_000).flatten(2) - predicted.mean.flatten(1)
    assert standard_errors(drawn, torch.zeros(())) < 5
    assert standard_errors(drawn.unsqueeze(-1) * drawn.unsqueeze(-2), predicted.cov) < 5


def test_draws_follow_the_seed():
    predicted = fitted(cases.CASES["mlp"]).predict(cases.CASES["mlp"].make()[1])
    state = torch.get_rng_state()
    assert torch.equal(predicted.sample(3), predicted.sample(3))
    assert torch.equal(predicted.sample(3, seed=1), predicted.sample(3, seed=1))
    assert not torch.equal(predicted.sample(3, seed=1), predicted.sample(3))
    assert torch.equal(torch.get_rng_state(), state)


# --- probabilities


@cases.every(CLASSES)
def test_probit_is_the_link_of_shrunk_logits(case):
    _, X, _, likelihood = case.make()
    predicted = fitted(case).predict(X)
    close(predicted.probs(), oracle.probit(likelihood, predicted.mean, predicted.variance), 1e-12)
    assert torch.equal(predicted.probs(), predicted.probs(method="probit"))


@cases.every(CLASSES)
def test_monte_carlo_averages_the_link_over_the_covariance(case):
    """Against as many independent draws, made with a root of JΣJᵀ: both within their standard errors."""
    _, X, _, likelihood = case.make()
    predicted, (J, Sigma) = fitted(case).predict(X[:3]), brute_force(case)
    root, draws = J[:3].flatten(1, -2) @ torch.linalg.cholesky(Sigma), DRAWS if X.ndim == 2 else 4_000
    normal = torch.randn(draws, root.shape[-1], 1, dtype=root.dtype, generator=torch.Generator().manual_seed(5))
    logits = predicted.mean + (root @ normal.unsqueeze(1)).reshape(draws, *predicted.mean.shape)
    expected = logits.softmax(2) if likelihood == "categorical" else logits.sigmoid()
    error = (expected.mean(0) - predicted.probs("mc", samples=draws)).abs() / (expected.std(0) * math.sqrt(2 / draws))
    assert error.max() < 5
    if likelihood == "categorical":
        close(predicted.probs("mc", samples=10).sum(1), torch.ones_like(predicted.mean[:, 0]), 1e-12)


@pytest.mark.parametrize("std", [0.1, 1.0, 3.0])
def test_bernoulli_probabilities_against_quadrature(std):
    """∫ sigmoid(o) N(o | f, v) do: sampling within five standard errors, probit within its known 0.02."""
    f = torch.tensor([[-4.0], [-1.0], [0.3], [2.5]]).double()
    predicted = predictive(f, torch.full((4, 1, 1), std**2).double(), ll.Bernoulli())

    def expected(mean, power):
        return integrate.quad(
            lambda z: stats.norm.pdf(z) / (1 + math.exp(-(mean + std * z))) ** power, -12, 12, epsabs=1e-12
        )[0]

    first, second = (torch.tensor([expected(float(m), k) for m in f]).double() for k in (1, 2))
    errors = ((second - first**2) / DRAWS).sqrt()
    assert ((predicted.probs("mc", samples=DRAWS)[:, 0] - first).abs() / errors).max() < 5
    assert (predicted.probs()[:, 0] - first).abs().max() < 0.02


def test_classes_may_lie_on_the_last_axis():
    net, X, _, _ = cases.CASES["image-classes"].make()
    last = nn.Sequential(net, Permuted())
    Y = mean_outputs(last, X).argmax(-1).roll(1, 1)
    predicted = fit(last, (X, Y), "categorical").predict(X[:2])
    ones = torch.ones_like(predicted.mean[..., 0])
    close(predicted.probs().sum(-1), ones, 1e-12)
    close(predicted.probs("mc", 10).sum(-1), ones, 1e-12)


class Permuted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)


# --- intervals


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_an_interval_holds_its_share_of_a_normal(level):
    _, X, _, _ = cases.CASES["mlp-two-outputs"].make()
    predicted = fitted(cases.CASES["mlp-two-outputs"]).predict(X)
    low, high = predicted.interval(level)
    normal = stats.norm(predicted.mean.numpy(), predicted.std.numpy())
    close(
        torch.as_tensor(normal.cdf(high.numpy()) - normal.cdf(low.numpy())),
        torch.full(low.shape, level, dtype=low.dtype),
        1e-12,
    )
    close((low + high) / 2, predicted.mean, 1e-12)


def test_ninety_per_cent_is_the_usual_level():
    predicted = fitted(cases.CASES["mlp"]).predict(cases.CASES["mlp"].make()[1])
    assert torch.equal(predicted.interval()[0], predicted.interval(0.9)[0])


# --- log probabilities


@MEANS
@cases.every(cases.named("mlp", "mlp-two-outputs", "image"))
def test_gaussian_log_probability_takes_all_outputs_jointly(case, mean):
    _, X, Y, _ = case.make()
    predicted = fitted(case).predict(X[:4], mean=mean)
    total = predicted.cov + torch.diag_embed((predicted.noise_std**2).flatten().expand(4, -1))
    expected = [
        stats.multivariate_normal(m, c).logpdf(y)
        for m, c, y in zip(predicted.mean.flatten(1).numpy(), total.numpy(), Y[:4].flatten(1).numpy(), strict=True)
    ]
    close(predicted.log_prob(Y[:4]), expected, 1e-10)


@pytest.mark.parametrize("std", [0.0, 0.05, 0.5, 1.5])
@pytest.mark.parametrize("count", [0, 1, 7, 60])
@pytest.mark.parametrize("mean", [-2.0, 0.0, 3.0])
def test_a_count_has_the_mixture_over_its_log_rate(mean, count, std):
    """∫ Poisson(y | e^o) N(o | f, v) do, expected or not."""
    if std == 0:
        expected = stats.poisson.logpmf(count, math.exp(mean))
    else:
        o = np.linspace(mean - 12 * std, mean + 12 * std + 8, 40_001)
        terms = stats.poisson.logpmf(count, np.exp(o)) + stats.norm.logpdf(o, mean, std)
        expected = terms.max() + math.log(integrate.simpson(np.exp(terms - terms.max()), x=o))
    f, v, y = (torch.tensor([x], dtype=torch.float64) for x in (mean, std**2, count))
    assert abs(float(poisson_mixture(y, f, v)) - expected) < 1e-6


@cases.every(cases.named("poisson"))
def test_counts_of_an_example_add_up(case):
    _, X, Y, _ = case.make()
    predicted = fitted(case).predict(X)
    close(predicted.log_prob(Y), poisson_mixture(Y, predicted.mean, predicted.variance).sum(1), 1e-12)
    twice = predictive(
        predicted.mean.repeat(1, 2), torch.diag_embed(predicted.variance.repeat(1, 2)), ll.Poisson()
    ).log_prob(Y.repeat(1, 2))
    close(twice, 2 * predicted.log_prob(Y), 1e-12)


@cases.every(CLASSES)
def test_labels_have_the_log_of_their_probit_probability(case):
    _, X, Y, likelihood = case.make()
    predicted = fitted(case).predict(X)
    p = predicted.probs()
    if likelihood == "categorical":
        chosen = p.gather(1, Y.unsqueeze(1)).log()
    else:
        chosen = torch.from_numpy(stats.bernoulli.logpmf(Y.numpy(), p.numpy()))
    close(predicted.log_prob(Y), chosen.flatten(1).sum(1), 1e-12)


def test_ignored_places_have_no_log_probability():
    _, X, Y, _ = cases.CASES["image-classes"].make()
    predicted = fitted(cases.CASES["image-classes"]).predict(X)
    hidden = Y.clone()
    hidden[:, 1:] = -100
    row = predicted.probs()[:, :, 0].gather(1, Y[:, :1]).log()
    close(predicted.log_prob(hidden), row.flatten(1).sum(1), 1e-12)


# --- what is unfamiliar


@cases.every(cases.named("mlp", "mlp-two-outputs", "mlp-classes", "poisson"))
def test_a_training_score_is_that_of_the_example_left_out(case):
    """tr J_n (H − J_nᵀW_nJ_n + Λ)⁻¹ J_nᵀ, for all that is learnt from the others."""
    net, X, Y, _ = case.make()
    post = fitted(case, curvature="dense")
    jacobian = ll.linearise(net).jacobian(X)
    likelihood, outputs = post.likelihood, ll.linearise(net).outputs(X)
    identity = torch.eye(outputs.shape[1]).double().expand(len(X), -1, -1)
    targets = likelihood.targets(Y, None, post.output_shape)
    root = likelihood.root_transpose(outputs, targets, identity) * post.setting.noise_precision.sqrt()
    rows, precision = root @ jacobian, torch.linalg.inv(post.factor.dense())
    left_out = [torch.linalg.inv(precision - own.mT @ own) for own in rows]
    scores = torch.stack([(j @ sigma @ j.mT).trace() for j, sigma in zip(jacobian, left_out, strict=True)])
    close(post.reference, scores.sort().values, 1e-6)


def test_the_rank_is_the_share_of_training_scores_below():
    case = cases.CASES["mlp"]
    _, X, _, _ = case.make()
    post = fitted(case)
    far = post.predict(torch.cat([1.1 * X[:5], 30 * X[:5]]))
    expected = [(post.reference < score).double().mean() for score in far.epistemic_score]
    close(far.epistemic_rank, expected, 1e-12)
    assert (far.epistemic_rank[5:] == 1).all()


@pytest.mark.parametrize("alarms", [0.05, 0.2, 0.5])
def test_the_cut_gives_the_chosen_share_of_false_alarms_on_new_examples(alarms):
    """Few examples for many weights: scores of the training examples themselves would be far too small."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    X, new = torch.randn(60, 6).double(), torch.randn(2000, 6).double()
    post = fit(net, (X, X[:, :1].sin() + 0.1 * torch.randn(60, 1).double()), "gaussian")
    share = float(post.predict(new).unfamiliar(alarms).double().mean())
    assert alarms - 0.1 <= share <= alarms + 0.1
    assert post.predict(30 * new).unfamiliar(alarms).double().mean() > 0.99
    own = float(
        (post.predict(new).epistemic_score > post.predict(X).epistemic_score.quantile(1 - alarms)).double().mean()
    )
    assert own > alarms + 0.1


# --- the forms inputs come in


class Both(nn.Module):
    """Takes two inputs, by place or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.layer(left * right)


@cases.every(cases.named("mlp", "image-classes", "embedding"))
def test_a_loader_gives_what_its_tensor_gives(case):
    """Whole batches, inputs alone, and NumPy arrays, to the rounding of other batch sizes."""
    _, X, Y, _ = case.make()
    post = fitted(case)
    whole = post.predict(X)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    pairs = list(zip(X.split(7), Y.split(7), strict=True))
    for same in (post.predict(loader), post.predict(list(X.split(3))), post.predict(pairs)):
        close(same.mean, whole.mean, 1e-12)
        close(same.cov, whole.cov, 1e-10)
        close(same.joint_cov, whole.joint_cov, 1e-10)
    assert torch.equal(post.predict(X.numpy()).variance, post.predict(X).variance)


def test_what_the_network_takes_is_predicted_from():
    torch.manual_seed(0)
    left, right = torch.randn(2, 20, 3, dtype=torch.float64)
    y = (left * right).sum(1, keepdim=True).sin()
    post = fit(Both(), [((left, right), y)], "gaussian")
    by_place, by_name = post.predict((left, right)), post.predict({"left": left, "right": right})
    loader = [{"left": left, "right": right, "labels": y}]
    for same in (by_name, post.predict(loader)):
        assert torch.equal(same.mean, by_place.mean)
        assert torch.equal(same.variance, by_place.variance)


def test_a_small_memory_changes_nothing_but_the_pieces():
    case = cases.CASES["mlp-two-outputs"]
    net, X, Y, _ = case.make()
    tight = fit(net, (X, Y), "gaussian", curvature="dense", memory=44_000)
    assert 1 < len(list(tight._pieces([X]))) <= len(X)
    close(tight.predict(X).cov, fitted(case, curvature="dense").predict(X).cov, 1e-8)


# --- what is refused

REGRESSION, LABELS, COUNTS = (partial(fitted, cases.CASES[name]) for name in ("mlp", "mlp-classes", "poisson"))


@pytest.mark.parametrize(
    ("post", "ask", "message"),
    [
        (REGRESSION, lambda p: p.probs(), "probs needs class labels, but this posterior's likelihood is gaussian: use mean"),
        (COUNTS, lambda p: p.probs(), "probs needs class labels, but this posterior's likelihood is poisson"),
        (LABELS, lambda p: p.probs("exact"), "method must be \"probit\" or \"mc\", but it is 'exact': choose one"),
        (LABELS, lambda p: p.interval(), "interval needs a regression, but this posterior's .* is categorical: use probs"),
        (REGRESSION, lambda p: p.interval(1.0), "level must lie between 0 and 1, but it is 1.0: 0.9 gives 90 % intervals"),
        (REGRESSION, lambda p: p.interval(0), "level must lie between 0 and 1, but it is 0"),
        (REGRESSION, lambda p: p.log_prob(torch.zeros(2, 2)), r"regression targets must have the outputs' shape \[n, 1\]"),
        (REGRESSION, lambda p: p.log_prob(torch.zeros(1, 1)), r"a target for each of the 2 predicted examples, but .* \[1, 1\]"),
        (REGRESSION, lambda p: p.log_prob(torch.zeros(())), r"a target for each of the 2 predicted examples, but .* \[\]: pass"),
    ],
)  # fmt: skip
def test_what_a_prediction_cannot_say_is_refused(post, ask, message):
    with pytest.raises(InputError, match=message):
        ask(post().predict(torch.zeros(2, 3).double()))


def test_what_cannot_be_predicted_from_is_refused():
    post = REGRESSION()
    with pytest.raises(InputError, match="mean must be one of 'network', 'linear', but it is 'affine': choose one"):
        post.predict(torch.zeros(2, 3).double(), mean="affine")
    with pytest.raises(InputError, match="predict takes what the network takes, or a loader, but it got a int: pass"):
        post.predict(3)
    with pytest.raises(DataError, match="inputs must be finite, but batch 1 holds 2 NaN or infinite numbers"):
        post.predict([torch.zeros(2, 3).double(), torch.full((1, 3), float("nan")).double()[:, :2]])
