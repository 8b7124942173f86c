"""k-rescaling end to end: the scale of normalised weights changes neither error bars nor evidence (Proposition 2).

Each network is fitted as it is, and again as a copy in which every normalised group has another scale k, running
statistics along with it. The copies compute the same outputs: whatever moves then, moves by the prior alone.
"""

import copy
import warnings
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn

import cases
import linlap as ll
from cases import Case, conv, linear, normal, relu, sequential, tanh, weight_normed
from fitted import LIKELIHOODS
from linlap.errors import EvidenceWarning, InvarianceWarning
from linlap.symmetry import NormalisedGroup, detect, rescaled
from losses import demanding_targets
from symmetric import both

SCALES = (1 / 16, 4.0, 16.0)


def layers(norm, activation):
    """Two normalised layers and a head."""
    body = (linear(3, 6), norm, activation, linear(6, 6), norm, activation)
    return lambda outputs: sequential(*body, linear(6, outputs))


def images(norm, channels: int, bias: bool):
    """One normalised convolution, one that is not, and a head."""
    body = (partial(nn.Conv2d, 1, channels, 3, bias=bias), norm, relu, conv(channels, 2), relu, nn.Flatten)
    return lambda outputs: sequential(*body, linear(8, outputs))


def weight_norms(outputs: int):
    return sequential(weight_normed(3, 5), tanh, weight_normed(5, outputs))


VECTORS, IMAGES = (3,), (1, 6, 6)
NETWORKS = {  # how it is built for that many outputs, the shape of an input, its normalised groups
    "layer-norm": (layers(partial(nn.LayerNorm, 6), relu), VECTORS, both("0", "3")),
    "rms-norm": (layers(partial(nn.RMSNorm, 6), tanh), VECTORS, both("0", "3")),
    "batch-norm": (layers(partial(nn.BatchNorm1d, 6), relu), VECTORS, both("0", "3")),
    "weight-norm": (weight_norms, VECTORS, [(f"{i}.parametrizations.weight.original1",) for i in (0, 2)]),
    "group-norm": (images(partial(nn.GroupNorm, 2, 4), 4, bias=True), IMAGES, both("0")),
    "instance-norm": (images(partial(nn.InstanceNorm2d, 2, affine=True), 2, bias=False), IMAGES, [("0.weight",)]),
}
KINDS = {"regression": ("gaussian", 1, 80), "classification": ("categorical", 3, 60)}  # outputs and examples

every_network = pytest.mark.parametrize("name", NETWORKS)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_scale = pytest.mark.parametrize("k", SCALES, ids=["1/16", "4", "16"])
invariant_priors = pytest.mark.parametrize("prior", ["auto", "layer"])

Answer = tuple[float, Tensor]


@lru_cache
def case_of(name: str, kind: str) -> Case:
    build, shape, _ = NETWORKS[name]
    likelihood, outputs, examples = KINDS[kind]
    return Case(name, likelihood, build(outputs), normal(examples, *shape))


@lru_cache
def data_of(case: Case) -> tuple[Tensor, Tensor]:
    """Its inputs, with targets for which the evidence keeps normalised weights too."""
    net, X, _, likelihood = case.make()
    return X, demanding_targets(net, X, likelihood)


@lru_cache
def groups_of(case: Case) -> tuple[NormalisedGroup, ...]:
    net, X, *_ = case.make()
    return detect(ll.linearise(net), X).normalised


def scaled(case: Case, scales: tuple[float, ...], epsilons: bool = True) -> nn.Module:
    """Its i-th normalised group at the i-th scale; with `epsilons` those of the norms scale along."""
    net = case.make()[0]
    for group, k in zip(groups_of(case), scales, strict=True):
        net = rescaled(net, group if epsilons else replace(group, epsilons={}), k)
    return net


def fitted(case: Case, net: nn.Module, **options) -> ll.Posterior:
    """On all but five examples; that an evidence is to be read with care is the only warning allowed."""
    X, Y = data_of(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvidenceWarning)
        return ll.fit(net, (X[5:], Y[5:]), LIKELIHOODS[case.likelihood], progress=False, **options)


def answer(case: Case, net: nn.Module, **options) -> Answer:
    """Log evidence, and predictive variance at inputs seen and unseen."""
    post = fitted(case, net, **options)
    return post.log_evidence, post.predict(data_of(case)[0]).variance


@lru_cache
def unscaled(case: Case, prior: str, model: str = "linear") -> Answer:
    return answer(case, case.make()[0], prior=prior, model=model)


def at_all(case: Case, k: float) -> tuple[float, ...]:
    return (k,) * len(groups_of(case))


def moved(after: Answer, before: Answer) -> tuple[float, float]:
    """By how much: the evidence in nats, the variance relative to itself where it moved most."""
    return abs(after[0] - before[0]), float((after[1] / before[1] - 1).abs().max())


# --- what stays


@every_kind
@every_network
def test_normalised_groups_are_those_the_architecture_has(name, kind):
    """And some of their directions are determined, so that what follows is not about weights that were pruned."""
    case = case_of(name, kind)
    assert [group.names for group in groups_of(case)] == NETWORKS[name][2]
    post = fitted(case, case.make()[0], prior="layer")
    together = {names: group for group, names in zip(post.groups, map(tuple, post.groups.values()), strict=True)}
    assert sum(post.effective_dimensions[together[group.names]] for group in groups_of(case)) > 1


@every_scale
@pytest.mark.parametrize("model", ["linear", "affine"])
@invariant_priors
@every_kind
@every_network
def test_the_scale_of_normalised_weights_changes_nothing(name, kind, prior, model, k):
    """Variance to 1e-6 of itself and evidence to 1e-6 nats, the epsilons co-scaled; no prior warns of anything."""
    case = case_of(name, kind)
    before = unscaled(case, prior, model)
    evidence, variance = moved(answer(case, scaled(case, at_all(case, k)), prior=prior, model=model), before)
    assert evidence < 1e-6
    assert variance < 1e-6


@invariant_priors
@every_kind
@pytest.mark.parametrize("name", ["layer-norm", "rms-norm", "batch-norm", "weight-norm"])
def test_each_group_may_have_a_scale_of_its_own(name, kind, prior):
    """By induction over the groups: one at 16, the other at 1/16 at the same time."""
    case = case_of(name, kind)
    evidence, variance = moved(answer(case, scaled(case, (16.0, 1 / 16)), prior=prior), unscaled(case, prior))
    assert evidence < 1e-6
    assert variance < 1e-6


@pytest.mark.parametrize("k", [4.0, 16.0])
@invariant_priors
@every_kind
@every_network
def test_an_epsilon_left_alone_is_hardly_seen(name, kind, prior, k):
    """Torch's default epsilons, and k > 1, at which they matter less than they did: to 1e-3, relative."""
    case = case_of(name, kind)
    before = unscaled(case, prior)
    evidence, variance = moved(answer(case, scaled(case, at_all(case, k), epsilons=False), prior=prior), before)
    assert evidence < 1e-3 * abs(before[0])
    assert variance < 1e-3


@invariant_priors
@cases.every(cases.named("group-norm", "batch-norm", "transformer"))
def test_convolutions_and_transformers_of_the_registry(case, prior):
    assert groups_of(case)
    evidence, variance = moved(answer(case, scaled(case, at_all(case, 1 / 16)), prior=prior), unscaled(case, prior))
    assert evidence < 1e-6
    assert variance < 1e-6


# --- what moves


@every_kind
@every_network
def test_one_plain_precision_depends_on_the_scale_and_says_so_beforehand(name, kind):
    """One λ for all weights: `InvarianceWarning` at the network as it is; then both move, by more than a tenth."""
    case = case_of(name, kind)
    with pytest.warns(InvarianceWarning, match='error bars and evidence depend on it. Use prior="auto"'):
        before = unscaled(case, "single")
    moves = []
    for k in SCALES:
        with pytest.warns(InvarianceWarning):
            moves.append(moved(answer(case, scaled(case, at_all(case, k)), prior="single"), before))
    evidence, variance = zip(*moves, strict=True)
    assert min(evidence) > 0.1
    assert min(variance) > 0.01
    assert max(variance) > 0.1


# --- rescalings of layers around a ReLU


def relu_scaled(net: nn.Module, first: str, second: str, k: float) -> nn.Module:
    """The layer before a ReLU by k, the weight of the layer behind it by 1/k."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.get_submodule(first).parameters():
            parameter.mul_(k)
        net.get_submodule(second).weight.div_(k)
    return net


DEEP = sequential(linear(3, 6), relu, linear(6, 4), relu, linear(4, 3))
DEEP_CLASSES = Case("mlp-relu-classes", "categorical", DEEP, normal(40, 3))


@every_scale
@pytest.mark.parametrize("layers", [("0", "2"), ("2", "4")], ids="-".join)
@cases.every([cases.CASES["mlp-relu"], DEEP_CLASSES])
def test_layers_around_a_relu_may_share_their_scale_in_any_way(case, layers, k):
    """ReLU(kz)/k = ReLU(z): the default prior does not see it, to 1e-6; one plain precision does."""
    net = case.make()[0]
    other = relu_scaled(net, *layers, k)
    X = case.make()[1]
    with torch.no_grad():
        torch.testing.assert_close(other(X), net(X), rtol=1e-12, atol=1e-12)
    evidence, variance = moved(answer(case, other), unscaled(case, "auto"))
    assert evidence < 1e-6
    assert variance < 1e-6
    evidence, variance = moved(answer(case, other, prior="single"), unscaled(case, "single"))
    assert evidence > 0.1
    assert variance > 0.1


# --- channels


@pytest.mark.parametrize(
    ("layer", "flat", "groups"),
    [
        (nn.ConvTranspose2d, 48, {"0.weight", "0.bias"}),
        (nn.Conv2d, 12, {f"0.weight[{i}]" for i in range(3)}),
    ],
)
def test_channels_are_those_of_the_first_axis_where_these_scale_alone(layer, flat, groups):
    """Those of a transposed convolution lie along the second: its tensors stay whole, and the prior invariant."""
    torch.manual_seed(0)
    net = nn.Sequential(layer(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(flat, 1)).double()
    X = torch.randn(30, 2, 3, 3).double()
    net(X)
    post = ll.fit(net, (X, X[:, 0, 0, :1].sin()), "regression", prior="channel", progress=False)
    assert {name for name in post.groups if name.startswith("0.")} == groups
