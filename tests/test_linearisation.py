"""`ll.linearise(net)`: f, J·v, Jᵀ·u and J of any network against plain reverse mode, row by row, and finite differences."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F
from torch.testing import assert_close

import cases
import linlap as ll
import oracle
from fitted import close, fit, flat

TIGHT = 1e-12


def directions(features: ll.Linearised, outputs: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some v [P] and u [n, C]."""
    generator = torch.Generator().manual_seed(seed)
    v, u = torch.randn(features.size, generator=generator), torch.randn(outputs.shape, generator=generator)
    return v.double(), u.flatten(1).double()


def agrees(net: nn.Module, X: Tensor, rtol: float = TIGHT) -> ll.Linearised:
    """Every product of a linearised network is that of the dense J which reverse mode gives, row by row."""
    features = ll.linearise(net)
    f, J = (tensor.flatten(1, -1 - i) for i, tensor in enumerate(oracle.jacobian(net, X)))
    v, u = directions(features, f)
    several = torch.stack([u, u.flip(1)], 1)
    outputs, pushed = features.jvp(X, v)
    again, pull = features.vjp(X)
    for got in (features.outputs(X), features.shaped_outputs(X).flatten(1), outputs, again):
        close(got, f, rtol)
    close(pushed, J @ v, rtol)
    close(pull(u), torch.einsum("ncp,nc->p", J, u), rtol)
    close(pull(2 * u), torch.einsum("ncp,nc->p", J, 2 * u), rtol)
    close(features.jacobian(X), J, rtol)
    close(features.pulled(X, several), several @ J, rtol)
    return features


def differs(net: nn.Module, X: Tensor, v: Tensor, step: float = 1e-5) -> Tensor:
    """J·v by central differences of the network as its user calls it, fused kernels and all."""
    net, features = copy.deepcopy(net).eval(), ll.linearise(net)
    ends = []
    for sign in (1, -1):
        moved = features.network.layout.split(features.network.trained + sign * step * v)
        with torch.no_grad():
            ends.append(functional_call(net, moved, X).flatten(1))
    return (ends[0] - ends[1]) / (2 * step)


@cases.every()
def test_every_product_is_that_of_the_dense_jacobian(case):
    net, X, _, _ = case.make()
    agrees(net, X)


@cases.every()
def test_every_product_is_that_of_finite_differences(case):
    net, X, _, _ = case.make()
    features = ll.linearise(net)
    v, _ = directions(features, features.outputs(X))
    close(features.jvp(X, v)[1], differs(net, X, v), 1e-7)


# --- layers without forward mode in the kernels that their user's calls take


class Fused(nn.Module):
    """Attention by the kernel torch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(causal.transpose(1, 2).flatten(2))


class Last(nn.Module):
    """A recurrent layer in some variant, read at its last step."""

    def __init__(self, layer: Callable[..., nn.Module], **options: object) -> None:
        super().__init__()
        self.layer = layer(4, 3, batch_first=True, **options)
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


encoder = partial(nn.TransformerEncoderLayer, 4, 2, 6, batch_first=True)
FUSED = {
    "attention": Fused,
    "multi-head attention": cases.SelfAttention,
    "encoder layer": encoder,
    "encoder layer, norm first": partial(encoder, norm_first=True),
    "encoder": lambda: nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False),
    "lstm": partial(Last, nn.LSTM),
    "two-way lstm of two layers": partial(Last, nn.LSTM, num_layers=2, bidirectional=True, dropout=0.3),
    "projected lstm": partial(Last, nn.LSTM, proj_size=2),
    "gru": partial(Last, nn.GRU),
    "relu rnn": partial(Last, nn.RNN, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_have_the_numbers_of_their_plain_versions(name):
    """In training mode, with dropout: to 1e-12 the oracle's, to 1e-7 finite differences of the fused kernels."""
    torch.manual_seed(0)
    net, X = FUSED[name]().double(), torch.randn(5, 3, 4).double()
    net(X)  # makes the lazy head
    features = agrees(net.train(), X)
    v, _ = directions(features, features.outputs(X))
    close(features.jvp(X, v)[1], differs(net, X, v), 1e-7)
    with torch.no_grad():
        own = net.eval()(X)
    assert torch.equal(features.network.as_trained(X), own)
    close(features.shaped_outputs(X), own, TIGHT)


# --- operations of one's own


class Old(torch.autograd.Function):
    """Written the old way: neither forward mode nor vmap; its derivative has a derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class New(torch.autograd.Function):
    """Written the new way, but without rules for forward mode and vmap."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Old.backward


class Once(Old):
    """Its derivative says that it has none."""

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Numpy(Old):
    """Its derivative is computed elsewhere."""

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(3 * ctx.saved_tensors[0].numpy() ** 2 * g.numpy())


class Detached(Old):
    """Its derivative silently has no derivative, as an extension's kernel has none."""

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g.detach()


class Complete(New):
    """With all rules."""

    generate_vmap_rule = True
    pushed = 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, tangent):
        Complete.pushed += 1
        return 3 * ctx.saved_tensors[0] ** 2 * tangent


class Own(nn.Module):
    """An operation of one's own beside a path around it, so that terms it drops leave others."""

    def __init__(self, operation: type[torch.autograd.Function], around: float) -> None:
        super().__init__()
        self.first, self.last, self.operation, self.around = nn.Linear(3, 4), nn.Linear(4, 2), operation, around

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.operation.apply(h) + self.around * h)


@pytest.mark.parametrize("around", [0.0, 1.0])
@pytest.mark.parametrize("operation", [Old, New, Once, Numpy, Detached, Complete], ids=lambda o: o.__name__)
def test_operations_of_ones_own_need_no_rule_but_backward(operation, around):
    torch.manual_seed(0)
    net, X = Own(operation, around).double(), torch.randn(6, 3).double()
    features = agrees(net, X)
    v, _ = directions(features, features.outputs(X))
    close(features.jvp(X, v)[1], differs(net, X, v), 1e-7)
    assert (Complete.pushed > 0) == (operation is Complete)
    Complete.pushed = 0


def test_a_fit_needs_no_rule_but_backward():
    torch.manual_seed(0)
    X = torch.randn(20, 3).double()
    nets = [Own(operation, 1.0).double() for operation in (Complete, Numpy)]
    nets[1].load_state_dict(nets[0].state_dict())
    Complete.pushed = 0
    plain, other = (fit(net, (X, X[:, :2].sin()), "gaussian") for net in nets)
    Complete.pushed = 0
    assert other.log_evidence == pytest.approx(plain.log_evidence, abs=1e-9)
    close(other.predict(X).cov, plain.predict(X).cov, 1e-9)


def test_backward_hooks_of_the_user_are_no_hindrance():
    net, X, _, _ = cases.CASES["mlp"].make()
    plain = ll.linearise(copy.deepcopy(net))
    for module in net:
        module.register_full_backward_hook(lambda module, taken, given: None)
        module.register_full_backward_pre_hook(lambda module, given: None)
    features = ll.linearise(net)
    v, u = directions(features, features.outputs(X))
    close(features.jvp(X, v)[1], plain.jvp(X, v)[1], TIGHT)
    close(features.vjp(X)[1](u), plain.vjp(X)[1](u), TIGHT)
    close(features.jacobian(X), plain.jacobian(X), TIGHT)


# --- which weights, in which mode and precision


@cases.every(cases.named("tied", "repeated", "transformer"))
def test_every_weight_counts_once_under_the_name_its_module_gives_it(case):
    net = case.make()[0]
    layout = ll.linearise(net).network.layout
    named = dict(net.named_parameters())
    assert layout.shapes == {name: p.shape for name, p in named.items()}
    assert layout.size == sum(p.numel() for p in named.values())
    assert torch.equal(ll.linearise(net).network.trained, flat(named).detach())
    if case.name == "tied":
        assert "first.weight" in layout.shapes
        assert "second.weight" not in layout.shapes


CHOICES = {
    "all": (None, ["0.weight", "0.bias", "2.bias"]),
    "weights": ("weights", ["0.weight"]),
    "last_layer": ("last_layer", ["2.bias"]),
    "by name": (lambda name, p: name.startswith("2."), ["2.weight", "2.bias"]),
    "by size": (lambda name, p: p.numel() > 4, ["0.weight", "0.bias", "2.weight"]),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_chosen_weights_have_the_columns_of_the_whole_jacobian(choice):
    """A predicate may also choose weights that are frozen, "2.weight" here; nothing else does."""
    net, X, _, _ = cases.CASES["mlp"].make()
    whole = ll.linearise(net).jacobian(X)
    columns = dict(zip((n for n, _ in net.named_parameters()), whole.split([15, 5, 5, 1], -1), strict=True))
    net[2].weight.requires_grad_(False)
    params, names = CHOICES[choice]
    features = ll.linearise(net, params)
    assert list(features.network.layout.shapes) == names
    assert ll.linearise(features) is features
    J = torch.cat([columns[name] for name in names], -1)
    v, u = directions(features, features.outputs(X))
    close(features.jacobian(X), J, TIGHT)
    close(features.jvp(X, v)[1], J @ v, TIGHT)
    close(features.vjp(X)[1](u), torch.einsum("ncp,nc->p", J, u), TIGHT)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.used = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_weights_that_forward_does_not_use_have_no_effect():
    X = torch.randn(4, 3).double()
    features = agrees(Unused().double(), X)
    assert not features.jacobian(X)[..., :8].any()


@pytest.mark.parametrize("mode", [True, False])
def test_eval_mode_and_running_statistics_whatever_the_mode(mode):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1)).double()
    X = torch.randn(7, 3).double()
    net(3 * X + 1)
    features = agrees(net.train(mode), X)
    close(features.jacobian(X)[:2], features.jacobian(X[:2]), TIGHT)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@cases.every(cases.named("mlp", "batch-norm", "transformer", "embedding"))
def test_half_precision_networks_are_linearised_in_single_precision(case, half):
    """With the half-precision weights and inputs as they are: bit for bit the network converted to float32."""
    net, X, _, _ = case.make()
    net = net.to(half)
    X = X.to(half) if X.is_floating_point() else X
    wide, features = ll.linearise(copy.deepcopy(net).float()), ll.linearise(net)
    wide_X = X.float() if X.is_floating_point() else X
    v, u = directions(features, wide.outputs(wide_X))
    pairs = [
        (features.outputs(X), wide.outputs(wide_X)),
        (features.jvp(X, v)[1], wide.jvp(wide_X, v)[1]),
        (features.vjp(X)[1](u), wide.vjp(wide_X)[1](u)),
        (features.jacobian(X), wide.jacobian(wide_X)),
    ]
    for got, wanted in pairs:
        assert got.dtype == torch.float32
        assert torch.equal(got, wanted)
    assert features.network.as_trained(X).dtype == half
    assert {p.dtype for p in net.parameters()} == {half}


def test_a_fit_of_a_half_precision_network_is_that_in_single_precision():
    net, X, Y, _ = cases.CASES["mlp"].make()
    net, X = net.bfloat16(), X.bfloat16()
    post, wide = fit(net, (X, Y), "gaussian"), fit(copy.deepcopy(net).float(), (X.float(), Y), "gaussian")
    assert post.log_evidence == wide.log_evidence
    assert torch.equal(post.predict(X).epistemic_std, wide.predict(X.float()).epistemic_std)
    with torch.no_grad():
        assert torch.equal(post.predict(X).mean, net(X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_precision_of_the_network_is_kept(dtype):
    net, X, Y, _ = cases.CASES["mlp"].make()
    net, X = net.to(dtype), X.to(dtype)
    features = ll.linearise(net)
    v, u = directions(features, features.outputs(X))
    pred = fit(net, (X, Y), "gaussian").predict(X)
    given = [features.jvp(X, v)[1], features.vjp(X)[1](u), features.jacobian(X), pred.mean, pred.std, pred.cov]
    assert {tensor.dtype for tensor in given} == {dtype}


# --- properties

ADJOINT = {case.name: case.make()[:2] for case in cases.named("mlp", "batch-norm", "attention", "gru", "image")}
FEATURES = {name: ll.linearise(net) for name, (net, _) in ADJOINT.items()}
numbers = st.floats(-1e3, 1e3, allow_nan=False)


@pytest.mark.parametrize("name", ADJOINT)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=numbers, rows=st.integers(1, 5))
def test_jvp_and_vjp_are_adjoint_and_linear(name, seed, scale, rows):
    """⟨u, Jv⟩ = ⟨Jᵀu, v⟩ and J(sv + w) = sJv + Jw to 1e-11 of the largest products, on any rows."""
    features, X = FEATURES[name], ADJOINT[name][1][:rows]
    f, pull = features.vjp(X)
    v, u = directions(features, f, seed)
    w = v.roll(1)
    pushed = features.jvp(X, v)[1]
    size = float(u.norm() * pushed.norm() + pull(u).norm() * v.norm())
    assert abs(float((u * pushed).sum() - pull(u) @ v)) <= 1e-11 * size
    both, other = features.jvp(X, scale * v + w)[1], features.jvp(X, w)[1]
    assert_close(
        both, scale * pushed + other, rtol=0, atol=1e-11 * (abs(scale) + 1) * float(pushed.norm() + other.norm())
    )


@cases.every(cases.named("mlp", "tied", "image-classes", "lstm"))
def test_outputs_at_other_weights_are_the_networks(case):
    net, X, _, _ = case.make()
    features = ll.linearise(net)
    moved = 1.1 * features.network.trained + 0.01
    for name, w in features.network.layout.split(moved).items():
        net.get_parameter(name).data.copy_(w)
    with torch.no_grad():
        close(features.outputs_at(moved, X), net(X).flatten(1), TIGHT)
