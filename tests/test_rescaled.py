"""Copies of a network in which a normalised group has another scale."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import cases
from linlap.features import linearise
from linlap.symmetry import rescaled
from symmetric import (
    PreResNet,
    found,
    normal,
    settled,
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def every_group():
    for case in cases.named("layer-norm", "rms-norm", "group-norm", "batch-norm", "weight-norm", "transformer"):
        net, X, *_ = case.make()
        yield case.name, net, X
    for name, net in (("final", PreResNet(nn.BatchNorm2d(3), bias=True)), ("pre", PreResNet(nn.Identity()))):
        X = normal(12, 1, 6, 6)
        yield name, settled(net, X), X


@pytest.mark.parametrize("k", [0.25, 3.0, 10.0])
def test_rescaled_networks_compute_the_same(k):
    for name, net, X in every_group():
        symmetries = found(net, X)
        assert symmetries.normalised, name
        for group in symmetries.normalised:
            scaled = rescaled(net, group, k)
            torch.testing.assert_close(scaled(X), net(X), rtol=1e-12, atol=1e-12)
            weights, before = dict(scaled.named_parameters()), dict(net.named_parameters())
            assert all(torch.equal(weights[n], before[n] * (k if n in group.names else 1)) for n in before)


def test_epsilons_may_stay():
    net, X, *_ = cases.CASES["batch-norm"].make()
    group = found(net, X).normalised[0]
    assert group.epsilons == {"1.eps": 2}
    scaled = rescaled(net, replace(group, epsilons={}), 0.25)
    with torch.no_grad():
        difference = float((scaled(X) - net(X)).norm() / net(X).norm())
    assert 1e-8 < difference < 1e-2
    assert scaled[1].eps == net[1].eps


@pytest.mark.parametrize("name", ["layer-norm", "batch-norm", "weight-norm", "transformer"])
def test_lemma_1_holds_at_another_scale(name):
    """J''_k = J''/k and J'_k = J', with statistics that scale along where there are any."""
    net, X, *_ = cases.CASES[name].make()
    k = 3.0

    def jacobian(module: nn.Module) -> dict[str, Tensor]:
        linearised = linearise(module)
        return linearised.network.layout.split(linearised.jacobian(X[:5]))

    before = jacobian(net)
    for group in found(net, X).normalised:
        after = jacobian(rescaled(net, group, k))
        for n, J in before.items():
            torch.testing.assert_close(after[n], J / k if n in group.names else J, rtol=1e-9, atol=1e-9)


def test_rescaled_leaves_the_network_alone():
    net, X, *_ = cases.CASES["batch-norm"].make()
    group = found(net, X).normalised[0]
    before = copy.deepcopy(net.state_dict())
    rescaled(net, group, 3.0)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert net[1].eps == 1e-5
