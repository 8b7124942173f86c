"""Detection of normalised weights (Definition 1) in layers and networks of many kinds."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import cases
from linlap.symmetry import rescaled
from linlap.symmetry.nullspace import common_scales, null_space, sparse_vectors
from symmetric import (
    STATISTICS,
    TRUNK,
    Encoder,
    PreResNet,
    both,
    dense,
    exponents,
    found,
    groups,
    image,
    normal,
    settled,
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# --- layers that normalise


class HandWritten(nn.Module):
    """Root mean square normalisation, its epsilon an attribute."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class Literal(nn.Module):
    """Standardisation with an epsilon that no attribute holds."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5), x.shape[-1:])


@pytest.mark.parametrize(
    ("norm", "setting", "certificate", "channelwise"),
    [
        (partial(nn.LayerNorm, 4), dense, "exact", False),
        (partial(nn.LayerNorm, 4, elementwise_affine=False), dense, "exact", False),
        (partial(nn.RMSNorm, 4), dense, "exact", False),
        (partial(nn.GroupNorm, 2, 4), image, "exact", False),
        (partial(HandWritten, 4), dense, "exact", False),
        (Literal, dense, "exact", False),
        (partial(nn.BatchNorm1d, 4), dense, STATISTICS, True),
        (partial(nn.BatchNorm2d, 4), image, STATISTICS, True),
        (partial(nn.SyncBatchNorm, 4), image, STATISTICS, True),
        (partial(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True), image, STATISTICS, True),
    ],
    ids=lambda value: getattr(value, "func", value).__name__ if callable(value) else None,
)
def test_weight_and_bias_before_a_normalisation(norm, setting, certificate, channelwise):
    net, X = setting(norm())
    symmetries = found(settled(net, X) if not isinstance(norm(), nn.SyncBatchNorm) else net.double().eval(), X)
    assert groups(symmetries) == both("layer")
    (group,) = symmetries.normalised
    assert group.certificate == certificate
    assert group.channelwise == channelwise
    assert group.residual < 1e-12
    buffers = {"norm.running_mean": 1, "norm.running_var": 2} if certificate == STATISTICS else {}
    assert group.buffers == buffers


def test_instance_norm_leaves_the_bias_without_effect():
    net, X = image(nn.InstanceNorm2d(4))
    symmetries = found(settled(net, X), X)
    assert groups(symmetries) == [("layer.weight",)]
    assert symmetries.without_effect == ("layer.bias",)


@pytest.mark.parametrize(("parametrise", "names"), [(weight_norm, "original1"), (spectral_norm, "original")])
def test_parametrised_directions(parametrise, names):
    net = nn.Sequential(parametrise(nn.Linear(3, 4)), nn.Tanh(), parametrise(nn.Linear(4, 2)))
    X = normal(20, 3)
    symmetries = found(settled(net, X), X)
    assert groups(symmetries) == [(f"{i}.parametrizations.weight.{names}",) for i in (0, 2)]
    assert all(g.certificate == "exact" for g in symmetries.normalised)
    assert all(g.channelwise == (parametrise is weight_norm) for g in symmetries.normalised)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_old_weight_norm():
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
    X = normal(20, 3)
    symmetries = found(net, X)
    assert groups(symmetries) == [("0.weight_v",)]
    torch.testing.assert_close(rescaled(net, symmetries.normalised[0], 3.0)(X), net(X), rtol=1e-12, atol=1e-12)


def test_gain_and_shift_before_layer_and_norm():
    """A norm's gain and shift, through a convolution without bias, meet the next norm: a group of two."""
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)),
    )
    X = normal(20, 1, 6, 6)
    assert groups(found(settled(net, X), X)) == [("0.weight",), ("1.weight", "1.bias"), ("3.weight",)]


def test_a_bias_goes_to_the_weight_beside_it():
    """The first norm's gain could claim it as well. One input is constant, and its norm gives nothing."""
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    X = normal(20, 3)
    X[:, 1] = 0.7
    symmetries = found(settled(net, X), X)
    assert groups(symmetries) == both("1")
    assert {"0.weight": 1.0, "0.bias": 1.0, "1.weight": -1.0} in exponents(symmetries)


def test_convolutions_before_relu_and_batch_norm():
    """The paper's convolutional network: the bias is inside ReLU, and part of the group."""
    layers = [(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(o)) for i, o in ((1, 3), (3, 4), (4, 5))]
    net = nn.Sequential(*(m for three in layers for m in three), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))
    X = normal(20, 1, 5, 5)
    symmetries = found(settled(net, X), X)
    assert groups(symmetries) == both("0", "3", "6")
    assert all(g.certificate == STATISTICS and g.channelwise for g in symmetries.normalised)


# --- residual networks

INNER = [(f"blocks.{i}.conv1.weight",) for i in (0, 1)]
GAINS = [(f"blocks.{i}.norm1.weight", f"blocks.{i}.norm1.bias") for i in (0, 1)]


def test_residual_trunk_with_a_final_norm():
    net, X = PreResNet(nn.BatchNorm2d(3)), normal(20, 1, 6, 6)
    symmetries = found(settled(net, X), X)
    assert set(groups(symmetries)) == {TRUNK, *INNER, *GAINS}
    trunk = symmetries.normalised[0]
    assert trunk.names == TRUNK
    layers = ("blocks.0.norm1", "blocks.1.norm1", "final")
    powers = {"running_mean": 1, "running_var": 2}
    assert trunk.buffers == {f"{layer}.{b}": p for layer in layers for b, p in powers.items()}


def test_residual_trunk_without_a_final_norm_is_a_rescaling():
    net, X = PreResNet(nn.Identity()), normal(20, 1, 6, 6)
    symmetries = found(settled(net, X), X)
    assert set(groups(symmetries)) == {*INNER, *GAINS}
    (trunk,) = (r for r in symmetries.rescalings if "stem.weight" in r.exponents)
    assert trunk.exponents == dict.fromkeys(TRUNK, 1.0) | {"head.weight": -1.0}
    assert trunk.certificate == STATISTICS
    assert trunk.buffers["blocks.0.norm1.running_var"] == 2


def test_a_shortcut_with_weights_splits_the_trunk():
    """The stages overlap in what is written after the shortcut: the smaller group keeps it."""
    net, X = PreResNet(nn.BatchNorm2d(3)), normal(20, 1, 6, 6)
    net.blocks[1].shortcut = nn.Conv2d(3, 3, 1, bias=False)
    symmetries = found(settled(net, X), X)
    assert ("blocks.1.conv2.weight", "blocks.1.shortcut.weight") in groups(symmetries)


def test_biases_before_batch_norm_join_the_trunk():
    net, X = PreResNet(nn.BatchNorm2d(3), bias=True), normal(20, 1, 6, 6)
    symmetries = found(settled(net, X), X)
    trunk = {name for weight in TRUNK for name in (weight, weight.replace("weight", "bias"))}
    inner = {
        ("blocks.0.conv1.weight", "blocks.0.conv1.bias"),
        ("blocks.1.conv1.weight", "blocks.1.conv1.bias"),
    }
    assert {frozenset(g) for g in groups(symmetries)} == {frozenset(trunk), *map(frozenset, inner)}


class Concatenated(nn.Module):
    """Densely connected: a layer's norm takes channels of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.conv2, self.norm2 = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.conv1(x)
        joined = torch.cat([first, self.conv2(F.relu(self.norm1(first)))], dim=1)
        return self.head(F.relu(self.norm2(joined)).mean((2, 3)))


def test_channels_of_one_norm_that_scale_apart():
    net, X = Concatenated(), normal(20, 1, 5, 5)
    symmetries = found(settled(net, X), X)
    first, second = (g for g in symmetries.normalised if g.names[0].startswith("conv"))
    assert first.names + second.names == ("conv1.weight", "conv1.bias", "conv2.weight")
    assert first.buffers["norm2.running_var"] == (2, 2, 0, 0, 0)
    assert second.buffers == {"norm2.running_mean": (0, 0, 1, 1, 1), "norm2.running_var": (0, 0, 2, 2, 2)}
    net.norm2.eps = 1e-16  # no one epsilon belongs to channels that scale apart
    torch.testing.assert_close(rescaled(net, first, 5.0)(X), net(X), rtol=1e-11, atol=1e-11)


def test_transformer_with_norms_first_has_a_normalised_stream():
    X = torch.randint(7, (20, 5))
    symmetries = found(settled(Encoder(norm_first=True), X), X)
    stream = {"embedding.weight", *both("layer.self_attn.out_proj")[0], *both("layer.linear2")[0]}
    assert [set(g) for g in groups(symmetries)] == [stream]
    assert symmetries.normalised[0].certificate == "exact"


def test_transformer_with_norms_last():
    """The second norm takes x + W₂ relu(W₁x + b₁) + b₂, x from the first: its gain, shift and the biases."""
    X = torch.randint(7, (20, 5))
    symmetries = found(settled(Encoder(norm_first=False), X), X)
    expected = {"layer.norm1.weight", "layer.norm1.bias", "layer.linear1.bias", "layer.linear2.bias"}
    assert [set(g) for g in groups(symmetries)] == [expected]
    inside = {"layer.linear1.weight": 1.0, "layer.linear1.bias": 1.0, "layer.linear2.weight": -1.0}
    assert inside in exponents(symmetries)


# --- rescalings, and networks without symmetry


def test_relu_layers_rescale_one_another():
    net, X, *_ = cases.CASES["mlp-relu"].make()
    symmetries = found(net, X)
    assert not symmetries.normalised
    pairs = [("0", "2"), ("2", "4")]
    assert exponents(symmetries) == [{f"{i}.weight": 1, f"{i}.bias": 1, f"{j}.weight": -1} for i, j in pairs]
    assert all(r.certificate == "exact" for r in symmetries.rescalings)


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) ** 2)


def test_exponents_other_than_one():
    X = normal(20, 3)
    (only,) = exponents(found(settled(Squared(), X), X))
    assert only == {"inner.weight": 1.0, "inner.bias": 1.0, "outer.weight": -2.0}


@cases.every(cases.named("mlp", "embedding", "lstm", "tied", "image"))
def test_no_symmetry(case):
    net, X, *_ = case.make()
    symmetries = found(net, X)
    assert symmetries.normalised == ()
    assert symmetries.rescalings == ()
    assert symmetries.without_effect == ()
    assert str(symmetries) == "no scale symmetry"


@cases.every(cases.named("layer-norm", "group-norm", "batch-norm"))
def test_trained_cases(case):
    net, X, *_ = case.make()
    symmetries = found(net, X)
    assert ("0.weight", "0.bias") in groups(symmetries)
    assert all(len({n.rpartition(".")[0] for n in g}) == 1 for g in groups(symmetries))


# --- linear algebra of exponents


def span(*vectors: list[float]) -> np.ndarray:
    mixed = np.array(vectors, dtype=float).T
    return np.linalg.qr(mixed @ np.random.default_rng(0).standard_normal((len(vectors), len(vectors))))[0]


def test_common_scales_are_zero_one_vectors():
    basis = span([1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, -1])
    assert common_scales(basis) == [(0, 1), (2, 3, 4), (2, 3, 5)]
    assert common_scales(span([1, -1, 0])) == []
    assert common_scales(np.zeros((3, 0))) == []


def test_sparse_vectors_complete_the_known_ones():
    known = np.array([[0, 1, 1, 0]], dtype=float).T
    (vector,) = sparse_vectors(span([1, -1, 0, 0], [0, 1, 1, 0]), known)
    np.testing.assert_allclose(vector, [1, -1, 0, 0], atol=1e-9)


def test_null_space_of_columns_of_any_size():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((12, 4)) * [1, 1e-4, 1e3, 1]
    rows[:, 3] = -rows[:, 0] - 2 * rows[:, 1]
    basis = null_space(rows, np.abs(rows), 1e-6)
    assert basis.shape == (4, 1)
    np.testing.assert_allclose(basis[:, 0] / basis[0, 0], [1, 2, 0, 1], atol=1e-6)
