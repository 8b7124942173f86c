"""What must not be taken for a symmetry, and what detection must leave as it was."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
from linlap.features import linearise
from linlap.symmetry import detect, rescaled, search
from linlap.symmetry.certificate import normalised
from linlap.symmetry.probe import probing
from symmetric import (
    STATISTICS,
    Encoder,
    both,
    dense,
    exponents,
    found,
    groups,
    normal,
    settled,
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# --- what must not be taken for a symmetry


def test_dead_units_have_no_effect():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        net[0].bias.fill_(-100)
    symmetries = found(net, normal(20, 3))
    assert symmetries.normalised == ()
    assert symmetries.without_effect == ("0.weight", "0.bias", "2.weight")
    assert str(symmetries).splitlines()[-1] == "0.weight, 0.bias, 2.weight: without effect on these inputs"


@pytest.mark.parametrize("bias", [0.0, 1e-11])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_zero_bias_belongs_to_its_weight(norm, bias):
    """Its Jacobian scales with the weight's, whatever its value."""
    net, X = dense(norm(4))
    settled(net, X)
    with torch.no_grad():
        net.layer.bias.fill_(bias)
    assert groups(found(net, X)) == both("layer")


class Stationary(nn.Module):
    """g(ka) is largest at k = 1, where ∇g ≠ 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.linear = nn.Parameter(torch.tensor([0.6, 0.8])), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x.sum(1, keepdim=True) ** 2 * self.a[0] * torch.exp(-(self.a**2).sum() / 2)


class Coincident(Stationary):
    """g(ka) = 0 at every k, but only because a happens to lie on a cone."""

    def __init__(self) -> None:
        super().__init__()
        self.a.data = torch.tensor([1.0, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x.sum(1, keepdim=True) ** 2 * (self.a[0] ** 2 - self.a[1] ** 2)


@pytest.mark.parametrize("net", [Stationary, Coincident])
def test_stationary_is_not_invariant(net):
    symmetries = found(net().double(), normal(20, 3))
    assert symmetries.normalised == ()
    assert symmetries.without_effect == ()


def test_saturated_units_are_not_normalised():
    net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        net[0].bias.fill_(1e4)
    symmetries = found(net, normal(20, 3))
    assert symmetries.normalised == ()
    assert set(symmetries.without_effect) == {"0.weight", "0.bias"}


class Faint(nn.Module):
    """A weight whose scale changes f by less than any tolerance for f."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.faint = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.loud(x) + 1e-9 * self.faint(x)


def test_a_weight_of_little_effect_is_not_normalised():
    linearised, X = linearise(Faint().double()), normal(20, 3)
    assert detect(linearised, X).normalised == ()
    with probing(linearised.network, X) as probe:
        assert probe.change({"faint.weight": 16 * probe.tensors["faint.weight"]}, "batch") < 1e-6
        assert normalised(probe, ["faint.weight"], []) is None


class Separate(nn.Module):
    """Attention with a key projection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)).flatten(1)


def test_key_bias_has_no_effect():
    symmetries = found(Separate().double(), normal(20, 3, 4))
    assert symmetries.without_effect == ("key.bias",)
    assert exponents(symmetries) == [{"query.weight": 1.0, "query.bias": 1.0, "key.weight": -1.0}]


def test_without_its_bias_a_weight_is_not_normalised():
    net, X, *_ = cases.CASES["layer-norm"].make()
    assert found(net, X, params="weights").normalised == ()


def test_a_frozen_bias_before_batch_norm_scales_with_the_statistics():
    net, X, *_ = cases.CASES["batch-norm"].make()
    symmetries = found(net, X, params="weights")
    assert groups(symmetries) == [("0.weight",), ("3.weight",)]
    assert symmetries.normalised[0].buffers == {"1.running_mean": 1, "1.running_var": 2, "0.bias": 1}
    scaled = rescaled(net, symmetries.normalised[0], 3.0)
    torch.testing.assert_close(scaled(X), net(X), rtol=1e-12, atol=1e-12)


def test_epsilons_that_are_more_than_a_blur_are_mentioned():
    net, X = dense(nn.LayerNorm(4, eps=1e-2))
    settled(net, X)
    with torch.no_grad():
        net.layer.weight *= 0.1
        net.layer.bias *= 0.1
    (note,) = found(net, X).notes
    assert note.startswith("the invariance is approximate: epsilons make")


# --- the user's world


class Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.norm, self.head = (
            nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2),
        )  # fmt: skip

    def forward(self, tokens: Tensor, mask: Tensor, shift: Tensor | None = None) -> Tensor:
        x = (self.embedding(tokens).tanh() * mask[..., None]).sum(1)
        return self.head(self.norm(self.layer(x)).tanh() + (0 if shift is None else shift))


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_inputs_of_any_form(form):
    tokens, mask = torch.randint(7, (20, 5)), torch.arange(5) < torch.randint(1, 6, (20, 1))
    shift = torch.tensor(0.1)
    inputs = (tokens, mask, shift) if form == "tuple" else {"tokens": tokens, "mask": mask, "shift": shift}
    assert groups(found(Inputs(), inputs)) == both("layer")


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_one_row_suffices(norm):
    net, X = dense(norm(4))
    assert groups(found(settled(net, X), X[:1])) == both("layer")


class Constant(nn.Module):
    """Insists on float32."""

    def __init__(self) -> None:
        super().__init__()
        self.constant, self.layer, self.norm, self.head = (
            torch.eye(3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(x @ self.constant)).tanh())


def test_a_network_that_runs_in_float32_only():
    symmetries = found(Constant(), torch.randn(20, 3))
    assert groups(symmetries) == both("layer")
    assert symmetries.normalised[0].residual < 1e-4


def test_half_precision():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).bfloat16()
    assert groups(found(net, torch.randn(20, 3).bfloat16())) == both("0")


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.calls, self.allowed = 0, math.inf

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.allowed:
            raise KeyError("broken")
        return self.layer(self.norm(x))


def snapshot(net: nn.Module):
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    return state, [m.training for m in net.modules()], torch.get_rng_state()


def same(before, after) -> bool:
    states = all(torch.equal(t, after[0][name]) for name, t in before[0].items())
    default = torch.get_default_dtype() == torch.float32
    return default and states and before[1] == after[1] and torch.equal(before[2], after[2])


@cases.every(cases.named("batch-norm", "weight-norm", "transformer", "lstm"))
def test_the_network_is_as_before(case):
    net, X, *_ = case.make()
    net.train()
    hooks = []
    net.register_forward_hook(lambda *_: hooks.append(1))
    before = snapshot(net)
    found(net, X)
    assert same(before, snapshot(net))
    assert all(p.grad is None for p in net.parameters())
    calls = len(hooks)
    net.eval()(X)
    assert len(hooks) == calls + 1


@pytest.mark.parametrize("allowed", [1, 10, 25])
def test_the_network_is_as_before_when_it_fails(allowed):
    net, X = Failing().double().train(), normal(20, 3)
    net.allowed = allowed
    before = snapshot(net)
    with pytest.raises(KeyError, match="broken"):
        found(net, X)
    assert same(before, snapshot(net))


def test_the_result_does_not_depend_on_the_random_state():
    net, X, *_ = cases.CASES["batch-norm"].make()
    first = found(net, X)
    torch.manual_seed(7)
    assert str(found(net, X)) == str(first)


def test_many_tensors_are_searched_inside_modules_only(monkeypatch):
    monkeypatch.setattr(search, "MANY", 5)
    X = torch.randint(7, (20, 5))
    net = nn.Sequential(Encoder(norm_first=True), nn.Linear(2, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 1))
    symmetries = found(settled(net, X), X)
    assert groups(symmetries) == both("1")
    assert symmetries.rescalings == ()
    (note,) = symmetries.notes
    assert note.endswith("tensors are too many to look for groups across modules")
    assert str(symmetries).splitlines()[-1] == note


def test_lines():
    net, X, *_ = cases.CASES["batch-norm"].make()
    first, *_, last = found(net, X).lines()
    assert first.startswith(f"0.weight, 0.bias: normalised, {STATISTICS}, one scale for each channel (largest")
    assert last.startswith("4.weight, 4.bias by k^1; 7.weight by k^-1: rescaling, exact (largest change")
