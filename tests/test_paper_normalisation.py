"""The paper's sections 3.2, 3.3 and 4: normalised networks, their lemmas and propositions, and Recommendation 2.

Numbers and LaTeX labels are those of Antorán et al. (ICML 2022), where propositions and lemmas are counted together. The
norms have next to no epsilon here, so that its statements hold to rounding. Batch norm on the statistics of the batch is the one
it speaks of; what holds with running statistics, as networks are linearised, is said and tested too.
"""

import copy
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn.utils import vector_to_parameters

import cases
import linlap as ll
import oracle
from cases import Case, linear, normal, relu, sequential
from fitted import LIKELIHOODS, UNIT, close, fit, flat, precision
from linlap.errors import InvarianceWarning
from linlap.symmetry import detect, rescaled
from losses import demanding_targets, minus_evidence, network_loss, random, weights_of

SCALES = pytest.mark.parametrize("k", [1 / 16, 0.5, 3.0, 16.0])
HALF = 0.5 * UNIT
HEAD = "6."

# --- normalised networks: all layers but the head, no epsilons, no gains or shifts


def normalised(norm, n_out: int):
    """Two normalised layers and a dense one: f = φ(θ''_{d:}, ·) θ'_{:d}."""
    return sequential(linear(3, 6), norm, relu, linear(6, 6), norm, relu, linear(6, n_out))


class BatchNorm(nn.Module):
    """On the statistics of the batch, in training and later."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.var(0, correction=0).sqrt()


NORMS = {
    "layer-norm": partial(nn.LayerNorm, 6, eps=0.0, elementwise_affine=False),
    "group-norm": partial(nn.GroupNorm, 2, 6, eps=0.0, affine=False),
    "rms-norm": partial(nn.RMSNorm, 6, eps=0.0, elementwise_affine=False),
    "batch-statistics": BatchNorm,
}
KINDS = {"gaussian": 1, "categorical": 3}  # numbers in an output


def each_kind(name: str, norm) -> list[Case]:
    return [Case(f"{name}-{kind}", kind, normalised(norm, n), normal(80, 3)) for kind, n in KINDS.items()]


ALL = [case for name, norm in NORMS.items() for case in each_kind(name, norm)]
FITTED = [case for case in ALL if "batch" not in case.name]  # an output may not depend on the other examples
RUNNING = each_kind("running-statistics", partial(nn.BatchNorm1d, 6, eps=1e-14, affine=False))


def in_second(net: nn.Module) -> Tensor:
    """Which weights are in Θ'' [P]."""
    return torch.cat([torch.full((p.numel(),), not n.startswith(HEAD)) for n, p in net.named_parameters()])


def scaled(net: nn.Module, k: float) -> nn.Module:
    """θ' + kθ'', and all that is no weight as it was."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.mul_(1.0 if name.startswith(HEAD) else k)
    return net


def factors(net: nn.Module, k: float) -> Tensor:
    """What θ' + θ'' is multiplied by to become θ' + kθ'' [P]."""
    return torch.where(in_second(net), k, 1.0).double()


def problems(case: Case, k: float, model: str = "affine") -> tuple[oracle.Problem, oracle.Problem, Tensor]:
    """The linear models about θ̃' + θ̃'' and about θ̃' + kθ̃'', and k in Θ'', 1 in Θ' [P]."""
    net, X, Y, likelihood = case.make()
    pair = (oracle.problem(n, X, Y, likelihood, model=model) for n in (net, scaled(net, k)))
    return *pair, factors(net, k)


# --- Definition 1 and its example


@SCALES
@cases.every(ALL)
def test_definition_1_normalised_networks(case, k):
    """def:normalised_networks. f(θ' + kθ'', ·) = f(θ' + θ'', ·) for weights of any values; in no other direction."""
    net, X, *_ = case.make()
    second = in_second(net)
    for seed in range(3):
        vector_to_parameters(random(len(second), seed=seed), net.parameters())
        close(scaled(net, k)(X).detach(), net(X).detach(), 1e-11)
    for parameter in net[6].parameters():
        parameter.data.mul_(k)
    assert (net(X) - scaled(net, 1.0)(X)).abs().max() == 0
    assert (scaled(net, k)(X) - case.make()[0](X)).abs().max() > 1e-2


def test_definition_1_worked_example():
    """appendix:definition_example. Two hidden units and layer norm: θ'' = [θ₁, θ₂, 0, 0], θ' = [0, 0, θ₃, θ₄]."""
    bare = partial(nn.Linear, bias=False)
    norm = partial(nn.LayerNorm, 2, eps=0.0, elementwise_affine=False)
    net, X, *_ = Case(
        "example", "gaussian", sequential(partial(bare, 1, 2), norm, partial(bare, 2, 1)), normal(9, 1)
    ).make()
    theta = weights_of(net)
    hidden = X @ theta[:2].view(1, 2)
    mean = hidden.mean(1, keepdim=True)
    by_hand = (hidden - mean) / ((hidden - mean) ** 2).mean(1, keepdim=True).sqrt() @ theta[2:].view(2, 1)
    close(net(X).detach(), by_hand, 1e-12)
    for k in (0.1, 7.0):
        vector_to_parameters(torch.cat([k * theta[:2], theta[2:]]), net.parameters())
        close(net(X).detach(), by_hand, 1e-11)


@cases.every(FITTED)
def test_definition_1_is_what_detection_finds(case):
    """The groups of `symmetry` are this Θ'', a layer at a time."""
    net, X, *_ = case.make()
    assert [g.names for g in detect(ll.linearise(net), X).normalised] == [(f"{i}.weight", f"{i}.bias") for i in (0, 3)]


# --- Proposition 1


@cases.every(ALL)
def test_proposition_1_a_normalised_network_has_no_minimum(case):
    """proposition:no-normalised-minimum. The slope of L_{f,Λ} along θ'' is ‖θ''‖²_Λ wherever one stands: never zero."""
    net, X, Y, likelihood = case.make()
    p, second = oracle.problem(net, X, Y, likelihood), in_second(net)
    for seed in range(3):
        Lambda = random(len(second), seed=seed).exp()
        loss = network_loss(net, X, p, Lambda, HALF)
        theta = p.theta + 0.3 * random(len(second), seed=seed + 10)
        along = theta * second
        close(grad(loss)(theta) @ along, (Lambda * along**2).sum(), 1e-9)
        nearer = [float(loss(torch.where(second, k * theta, theta))) for k in (1.0, 0.5, 0.1, 1e-3)]
        assert nearer == sorted(nearer, reverse=True)
        close(nearer[0] - nearer[-1], 0.5 * (Lambda * along**2).sum() * (1 - 1e-6), 1e-9)


@cases.every(FITTED)
def test_proposition_1_but_its_linearisation_has_one_elsewhere(case):
    """Training under weight decay never ends at θ⋆: the linear loss has its one minimum away from θ̃."""
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood, model="affine")
    Lambda = torch.full_like(p.theta, 0.3)
    theta = oracle.theta_star(p, Lambda, HALF)
    assert (theta - p.theta).norm() > 0.1
    assert oracle.regularised_loss(p, theta, Lambda, HALF) < oracle.regularised_loss(p, p.theta, Lambda, HALF) - 0.01


# --- the lemma of scaling


@SCALES
@cases.every(ALL)
def test_lemma_scaling_of_features_and_curvature(case, k):
    """lemma:scaling. J'_k = J', J''_k = J''/k, so H'_k = H', X_k = X/k, H''_k = H''/k²; h_k(θ' + kθ'') = h(θ' + θ'')."""
    p, p_k, factor = problems(case, k)
    close(p_k.J * factor, p.J, 1e-9)
    theta = random(len(factor))
    close(p_k.outputs(factor * theta), p.outputs(theta), 1e-9)
    H, H_k = p.H(p.outputs(theta), HALF), p_k.H(p_k.outputs(factor * theta), HALF)
    close(factor[:, None] * H_k * factor, H, 1e-9)


@SCALES
@cases.every(ALL)
def test_lemma_scaling_of_losses_and_evidence(case, k):
    """lemma:stationary-points, its two equalities: L_{h_k,Λ_k}(θ_k) = L_{h,Λ}(θ) and M_{θ_k}(Λ_k) = M_θ(Λ), any θ and Λ."""
    p, p_k, factor = problems(case, k)
    for seed in range(3):
        theta, Lambda = random(len(factor), seed=seed), random(len(factor), seed=seed + 10).exp()
        theta_k, Lambda_k = factor * theta, Lambda / factor**2
        loss, loss_k = (
            oracle.regularised_loss(q, *at, HALF) for q, *at in ((p, theta, Lambda), (p_k, theta_k, Lambda_k))
        )
        close(loss_k, loss, 1e-10)
        for outputs, outputs_k in ((p.f, p_k.f), (p.outputs(theta), p_k.outputs(theta_k))):  # H at θ̃, H at θ
            M, M_k = minus_evidence(p.H(outputs, HALF), theta), minus_evidence(p_k.H(outputs_k, HALF), theta_k)
            close(M_k(Lambda_k), M(Lambda), 1e-9)


# --- the lemma of stationary points, Proposition 2 and Recommendation 2: by the library

MODELS = pytest.mark.parametrize("model", ["linear", "affine"])
CURVATURE_AT = pytest.mark.parametrize("hessian_at", ["trained", "optimum"])


@lru_cache
def targets(case: Case) -> Tensor:
    """For which the evidence keeps normalised weights too."""
    net, X, _, likelihood = case.make()
    return demanding_targets(net, X, likelihood)


def fit_scaled(case: Case, k: float, **options) -> ll.Posterior:
    """The posterior about θ̃' + kθ̃''."""
    net, X, _, likelihood = case.make()
    return fit(scaled(net, k), (X, targets(case)), likelihood, **options)


APART = {"first": f"{HEAD}*", "second": "*"}  # Λ' and Λ'' parametrised independently: no more than that


@lru_cache
def reference(case: Case, model: str, hessian_at: str) -> ll.Posterior:
    return fit_scaled(case, 1.0, prior=APART, model=model, hessian_at=hessian_at)


@pytest.mark.parametrize("k", [1 / 16, 3.0])
@CURVATURE_AT
@MODELS
@cases.every(FITTED)
def test_lemma_stationary_points_and_proposition_2(case, model, hessian_at, k):
    """lemma:stationary-points: (θ⋆, Λ⋆) at k is (θ'⋆ + kθ''⋆, Λ'⋆ + k⁻²Λ''⋆). proposition:unique-posterior: same bars.

    With the curvature at θ⋆, and at θ̃ as Recommendation 1 has it.
    """
    net, X, *_ = case.make()
    post = reference(case, model, hessian_at)
    other = fit_scaled(case, k, prior=APART, model=model, hessian_at=hessian_at)
    factor = factors(net, k)
    assert post.effective_dimensions["second"] > 1
    close(flat(other.weights), factor * flat(post.weights), 1e-6)
    close((precision(other) * factor**2).log(), precision(post).log(), 1e-6)
    close(other.log_evidence, post.log_evidence, 1e-9)
    inputs = torch.cat([X, 3 * random(10, 3)])
    close(other.predict(inputs).variance, post.predict(inputs).variance, 1e-6)


@pytest.mark.parametrize("prior", ["auto", "layer", "normalised", "tensor"])
@cases.every(FITTED)
def test_recommendation_2_independent_precisions_for_normalised_groups(case, prior):
    """rec:factorised_prior. With these no scale is seen; with one for all it is, after a warning."""
    X = case.make()[1]
    before, after = (fit_scaled(case, k, prior=prior) for k in (1.0, 5.0))
    close(after.predict(X).variance, before.predict(X).variance, 1e-6)
    close(after.log_evidence, before.log_evidence, 1e-9)


@cases.every(FITTED)
def test_recommendation_2_one_precision_for_all_depends_on_the_scale(case):
    """fig:k_scan, right: "in general, it does"."""
    net, X, Y, _ = case.make()
    before, after = (fit_scaled(case, k, prior="single") for k in (1.0, 5.0))
    assert abs(after.log_evidence - before.log_evidence) > 0.1
    assert (after.predict(X).variance / before.predict(X).variance - 1).abs().max() > 0.05
    with pytest.warns(InvarianceWarning, match="scale"):
        ll.fit(net, (X, Y), LIKELIHOODS[case.likelihood], prior="single", progress=False)


# --- section 3.3: a dense final layer


@cases.every([*ALL, *RUNNING])
def test_network_is_in_the_span_of_its_jacobian(case):
    """φ(θ_{d:}, ·) is among the features: J[0, θ'] = f, with any body at all."""
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood)
    close(p.J @ torch.where(in_second(net), 0.0, p.theta), p.f, 1e-12)


@cases.every(ALL)
def test_equation_directional_derivative_is_zero(case):
    """eq:directional-deriv-zero: J''θ̃'' = 0. So f − Jθ̃ = 0, and full and simple model are one (eq:simple_linear_model)."""
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood)
    size = (p.J.abs() @ p.theta.abs()).max()
    assert (p.J @ torch.where(in_second(net), p.theta, 0.0)).abs().max() < 1e-11 * size
    assert oracle.problem(net, X, Y, likelihood, model="affine").c.abs().max() < 1e-11 * size


@cases.every(FITTED)
def test_equation_simple_linear_model_is_the_full_one_here(case):
    """eq:simple_linear_model, by the library."""
    _, X, *_ = case.make()
    simple, full = (fit_scaled(case, 1.0, prior="layer", model=m) for m in ("linear", "affine"))
    close(full.log_evidence, simple.log_evidence, 1e-9)
    close(flat(full.weights), flat(simple.weights), 1e-6)
    close(full.predict(X, mean="linear").mean, simple.predict(X, mean="linear").mean, 1e-6)


# --- where its assumptions end


@cases.every(RUNNING)
def test_running_statistics_break_definition_1_unless_they_scale_along(case):
    """In eval mode the statistics stay when the weights move: J''θ̃'' ≠ 0, and simple and full differ. Co-scaled, all is well."""
    net, X, Y, likelihood = case.make()
    p = oracle.problem(net, X, Y, likelihood)
    assert (scaled(net, 3.0)(X) - net(X)).abs().max() > 0.1
    assert (p.J @ torch.where(in_second(net), p.theta, 0.0)).abs().max() > 0.1
    other = net
    for group in detect(ll.linearise(net), X).normalised:
        other = rescaled(other, group, 3.0)
    close(weights_of(other), factors(net, 3.0) * p.theta, 1e-14)
    p_k = oracle.problem(other, X, Y, likelihood)
    close(p_k.f, p.f, 1e-11)
    close(p_k.J * factors(net, 3.0), p.J, 1e-9)


@cases.every(RUNNING)
def test_biases_before_batch_norm_are_features_in_eval_mode(case):
    """On the batch's statistics a bias before the norm is without effect; on running ones it shifts the output."""
    net, X, Y, likelihood = case.make()
    columns = slice(net[0].weight.numel(), net[0].weight.numel() + net[0].bias.numel())  # of the first bias
    assert oracle.problem(net, X, Y, likelihood).J[..., columns].abs().max() > 1e-2
    batch, X, Y, _ = next(c for c in ALL if c.name == f"batch-statistics-{likelihood}").make()
    assert oracle.problem(batch, X, Y, likelihood).J[..., columns].abs().max() < 1e-12


@cases.every(FITTED)
def test_weights_without_their_biases_are_not_normalised(case):
    """ "On network biases": the norm divides by what depends on both, so weights alone are not in Θ''."""
    net, X, *_ = case.make()
    assert detect(ll.linearise(net, "weights"), X).normalised == ()
    for layer in (0, 3):
        nn.init.zeros_(net[layer].bias)
    assert [g.names for g in detect(ll.linearise(net, "weights"), X).normalised] == [("0.weight",), ("3.weight",)]
