"""`ll.inspect`: what it shows agrees with what `fit` does, and nothing is touched."""

import copy

import pytest
import torch
from torch import nn

import cases
import linlap as ll
from fitted import fit
from linlap import planning
from linlap.errors import DataError, InputError, NotFiniteError


@cases.every(cases.named("mlp", "layer-norm", "batch-norm", "weight-norm", "tied", "bare", "embedding"))
def test_it_shows_what_fit_does(case):
    net, X, Y, likelihood = case.make()
    seen = ll.inspect(net, X, n_data=len(X))
    post = fit(net, (X, Y), likelihood)
    assert seen.groups == post.groups
    assert seen.chosen == post.curvature
    assert seen.size == post.linearised.size
    assert {w.name: torch.Size(w.shape) for w in seen.weights} == {n: w.shape for n, w in post.weights.items()}


def test_normalised_weights_carry_their_certificate():
    net, X, _, _ = cases.CASES["batch-norm"].make()
    seen = ll.inspect(net, X)
    certified = {line.name: line.certificate for line in seen.weights}
    assert certified["0.weight"] == certified["0.bias"] == "normalised, with co-scaled statistics"
    assert certified["7.weight"] == ""
    assert "0.weight, 0.bias: normalised, with co-scaled statistics" in str(seen)


def test_rescalings_and_weights_without_effect_are_shown():
    net, X, _, _ = cases.CASES["attention"].make()
    mlp, inputs, _, _ = cases.CASES["mlp-relu"].make()
    assert "rescaling" in str(ll.inspect(mlp, inputs))
    dead = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        dead[0].bias.fill_(-100)
    assert "without effect on these inputs" in str(ll.inspect(dead, torch.randn(5, 3).double()))
    assert ll.inspect(net, X).outputs == 2


def test_a_prior_that_ties_normalised_weights_is_named_beforehand():
    net, X, _, _ = cases.CASES["layer-norm"].make()
    assert ll.inspect(net, X).mixed == ()
    seen = ll.inspect(net, X, prior="single")
    assert seen.mixed
    assert seen.groups == {"all": list(dict(net.named_parameters()))}
    assert "warning: this prior ties the arbitrary scale of 0.weight, 0.bias" in str(seen)


def test_channels_share_one_line_for_each_weight():
    net, X, _, _ = cases.CASES["batch-norm"].make()
    seen = ll.inspect(net, X, prior="channel")
    assert next(line.group for line in seen.weights if line.name == "0.weight") == "0.weight[…]"


def test_costs_are_those_of_the_planner():
    net, X, _, _ = cases.CASES["mlp-classes"].make()
    seen = ll.inspect(net, X, n_data=10**6, memory="1GiB")
    sizes = planning.Sizes(10**6, 3, seen.size, 1)
    for line in seen.curvatures:
        cost = sizes.cost(planning.STRUCTURES[line.name])
        assert (line.operations, line.bytes) == (cost.operations, cost.bytes)
        assert line.fits == (cost.bytes <= 2**30)
        assert line.seconds > 0
    assert {line.name for line in seen.curvatures} == set(planning.STRUCTURES)
    assert seen.chosen == planning.choose("auto", sizes, 2**30).name == "dense"
    assert "does not fit" in str(seen)


def test_where_nothing_fits_it_says_what_to_do():
    net, X, _, _ = cases.CASES["mlp-classes"].make()
    seen = ll.inspect(net, X, n_data=10**6, memory=100)
    assert seen.chosen is None
    assert "nothing fits: pass memory= if there is more" in str(seen)


def test_some_weights_only():
    net, X, _, _ = cases.CASES["mlp"].make()
    seen = ll.inspect(net, X, params="last_layer")
    assert [line.name for line in seen.weights] == ["2.weight", "2.bias"]
    assert seen.size == 6
    assert "20 other numbers stay fixed" in str(seen)


def test_the_text_is_a_table():
    net, X, _, _ = cases.CASES["mlp"].make()
    lines = str(ll.inspect(net, X, n_data=1000)).splitlines()
    assert lines[0] == "26 weights in 4 groups; 1,000 examples of 1 outputs"
    assert lines[2].split() == ["weight", "shape", "group", "block", "scale"]
    assert lines[3].split() == ["0.weight", "5", "×", "3", "0.weight", "kron"]
    assert "no scale symmetry" in "\n".join(lines)
    assert [line.split()[0] for line in lines if line.endswith("chosen")] == ["dense"]


def test_a_loader_will_do():
    net, X, Y, _ = cases.CASES["mlp"].make()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    assert ll.inspect(net, loader, n_data=len(X)).groups == ll.inspect(net, X).groups


def test_nothing_is_touched():
    net, X, _, _ = cases.CASES["batch-norm"].make()
    net.train()
    before, random = copy.deepcopy(net.state_dict()), torch.random.get_rng_state()
    ll.inspect(net, X)
    assert net.training
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_what_it_refuses():
    net, X, _, _ = cases.CASES["mlp"].make()
    with pytest.raises(DataError, match="at least one input, but not one came: pass a few rows"):
        ll.inspect(net, X[:0])
    with pytest.raises(DataError, match="inputs must be finite, but batch 0 holds 1"):
        ll.inspect(net, torch.tensor([[0.0, float("nan"), 1.0]]).double())
    with pytest.raises(InputError, match="prior must be one of"):
        ll.inspect(net, X, prior="unknown")
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match="the network's outputs must be finite"):
        ll.inspect(net, X)
