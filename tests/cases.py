"""A registry of tiny seeded networks with their data (float64, at most 200 weights), which every test reuses.

Each network has taken a few dozen Adam steps, so that it is neither random nor at its optimum.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import oracle


@dataclass(frozen=True)
class Case:
    """The recipe of a network and its inputs; make() gives it trained, and its data, as your own copies."""

    name: str
    likelihood: str
    build: Callable[[], nn.Module]
    X: Callable[[], Tensor]

    def make(self) -> tuple[nn.Module, Tensor, Tensor, str]:
        net, X, Y = trained(self)
        return copy.deepcopy(net), X.clone(), Y.clone(), self.likelihood


@lru_cache
def trained(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, X = case.build().double(), case.X()
        Y = targets(case.likelihood, signal(X, net(X).shape))
        adam = torch.optim.Adam(net.parameters(), lr=0.02)
        loss = torch.func.vmap(oracle.LOSSES[case.likelihood], (0, 0, None))
        for _ in range(40):  # in training mode, so that batch norm collects running statistics
            adam.zero_grad()
            loss(net(X), Y, torch.tensor(1.0).double()).mean().backward()
            adam.step()
        adam.zero_grad()
    return net.eval(), X, Y


def signal(X: Tensor, shape: torch.Size) -> Tensor:
    """A smooth noisy function of the inputs: local for images to images, a random projection otherwise."""
    if len(shape) == 4:
        kernel = torch.randn(shape[1], X.shape[1], 3, 3, dtype=X.dtype)
        clean = nn.functional.conv2d(X, kernel, padding=1)
    else:
        flat = X.double().flatten(1)
        clean = flat @ torch.randn(flat.shape[1], shape[1], dtype=flat.dtype) / flat.shape[1] ** 0.5
    return clean.sin() + 0.3 * torch.randn_like(clean)


def targets(likelihood: str, s: Tensor) -> Tensor:
    return {
        "gaussian": lambda: s,
        "categorical": lambda: s.argmax(1),
        "bernoulli": lambda: (s > 0).to(s),
        "poisson": lambda: torch.poisson(s.exp()),
    }[likelihood]()


# --- inputs and networks


def normal(*shape: int) -> Callable[[], Tensor]:
    return partial(torch.randn, *shape, dtype=torch.float64)


def tokens(vocabulary: int, *shape: int) -> Callable[[], Tensor]:
    return partial(torch.randint, vocabulary, shape)


def sequential(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def linear(n_in: int, n_out: int) -> Callable[[], nn.Module]:
    return partial(nn.Linear, n_in, n_out)


def conv(n_in: int, n_out: int, padding: int = 0) -> Callable[[], nn.Module]:
    return partial(nn.Conv2d, n_in, n_out, 3, padding=padding)


def weight_normed(n_in: int, n_out: int) -> Callable[[], nn.Module]:
    return lambda: weight_norm(nn.Linear(n_in, n_out))


class Tied(nn.Module):
    """Two modules that share one weight, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


class Repeated(nn.Module):
    """One module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh()).tanh())


class Bare(nn.Module):
    """Parameters that belong to no layer, a scalar among them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
        self.gain, self.head = nn.Parameter(torch.ones(())), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gain * (x @ self.matrix + self.shift).tanh())


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    """A recurrent layer, read at its last step."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.recurrent, self.head = layer(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


encoder = partial(nn.TransformerEncoderLayer, 4, 2, dim_feedforward=6, dropout=0.0, batch_first=True)
pooled = sequential(partial(nn.AdaptiveAvgPool2d, 1), nn.Flatten)
tanh, relu, ln, rms = nn.Tanh, nn.ReLU, partial(nn.LayerNorm, 5), partial(nn.RMSNorm, 5)
gn, bn = partial(nn.GroupNorm, 2, 4), nn.BatchNorm2d

# --- the registry

G, C, B, P = "gaussian", "categorical", "bernoulli", "poisson"
ln_net = sequential(linear(3, 5), ln, relu, linear(5, 5), ln, relu, linear(5, 1))
embedding_net = sequential(partial(nn.Embedding, 7, 3), tanh, nn.Flatten, linear(12, 3))
bn_net = sequential(conv(1, 4), partial(bn, 4), relu, conv(4, 3), partial(bn, 3), relu, pooled, linear(3, 3))
ALL = (
    Case("mlp", G, sequential(linear(3, 5), tanh, linear(5, 1)), normal(40, 3)),
    Case("mlp-relu", G, sequential(linear(3, 6), relu, linear(6, 4), relu, linear(4, 1)), normal(40, 3)),
    Case("mlp-two-outputs", G, sequential(linear(3, 5), tanh, linear(5, 2)), normal(30, 3)),
    Case("deep-linear", G, sequential(linear(3, 4), linear(4, 4), linear(4, 2)), normal(30, 3)),
    Case("mlp-classes", C, sequential(linear(3, 5), tanh, linear(5, 3)), normal(30, 3)),
    Case("bernoulli", B, sequential(linear(3, 5), tanh, linear(5, 3)), normal(30, 3)),
    Case("poisson", P, sequential(linear(3, 5), tanh, linear(5, 1)), normal(30, 3)),
    Case("layer-norm", G, ln_net, normal(40, 3)),
    Case("rms-norm", G, sequential(linear(3, 5), rms, tanh, linear(5, 1)), normal(40, 3)),
    Case("group-norm", C, sequential(conv(1, 4), gn, relu, pooled, linear(4, 3)), normal(24, 1, 5, 5)),
    Case("batch-norm", C, bn_net, normal(24, 1, 6, 6)),
    Case("weight-norm", G, sequential(weight_normed(3, 5), tanh, weight_normed(5, 1)), normal(40, 3)),
    Case("image", G, sequential(conv(1, 3, 1), tanh, conv(3, 2, 1)), normal(5, 1, 4, 4)),
    Case("image-classes", C, sequential(conv(1, 3, 1), tanh, conv(3, 3, 1)), normal(5, 1, 4, 4)),
    Case("tied", G, Tied, normal(40, 4)),
    Case("repeated", C, Repeated, normal(30, 4)),
    Case("bare", G, Bare, normal(40, 3)),
    Case("attention", C, SelfAttention, normal(20, 3, 4)),
    Case("transformer", C, sequential(encoder, nn.Flatten, linear(12, 2)), normal(20, 3, 4)),
    Case("lstm", G, partial(Recurrent, nn.LSTM), normal(30, 4, 2)),
    Case("gru", G, partial(Recurrent, nn.GRU), normal(30, 4, 2)),
    Case("embedding", C, embedding_net, tokens(7, 30, 4)),
)
CASES = {case.name: case for case in ALL}


def every(cases: Iterable[Case] = ALL) -> pytest.MarkDecorator:
    """Runs a test, which takes the argument `case`, on each case."""
    return pytest.mark.parametrize("case", list(cases), ids=lambda case: case.name)


def named(*names: str) -> list[Case]:
    return [CASES[name] for name in names]


def with_likelihood(*names: str) -> list[Case]:
    return [case for case in ALL if case.likelihood in names]
