"""Networks with all that a call may leave traces in, and portraits of them, of random states and of settings."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 3, generator=GENERATOR, dtype=torch.float64)
Y = X.sum(1, keepdim=True).sin() + 0.3 * torch.randn(24, 1, generator=GENERATOR, dtype=torch.float64)


class Everything(nn.Module):
    """A network with all that a call may leave traces in, and a forward that leaves as many as it can."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(3, 4))
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.second = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.third = old_weight_norm(nn.Linear(4, 4))
        self.tied, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.tied.weight = self.third.weight_v
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.table, self.last, self.count, self.log, self.facts = torch.ones(4).double(), None, 0, [], {"calls": 0}
        self.guard: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.guard()
        h = self.drop(self.norm(self.first(x))).tanh()
        self.calls += 1
        self.seen = self.seen + h.detach().mean(0)
        self.table.add_(1.0)
        self.last, self.count, self.new = h, self.count + 1, h
        self.log.append(h)
        self.facts["calls"] += 1
        return self.head(self.tied(self.third(self.second(h)).tanh()).tanh())


def old_weight_norm(layer: nn.Module) -> nn.Module:
    """It keeps the weight as a plain tensor, made anew by a hook before every forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def everything() -> Everything:
    """Trained a little; some gradients left, some weights frozen, modes mixed, hooks of every kind."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Everything().double()
        for _ in range(3):
            ((net(X) - Y) ** 2).mean().backward()
    net.log.clear()
    del net.new
    net.head.bias.requires_grad_(False)
    net.norm.bias.grad = None
    net.train()
    net.norm.eval()
    net.head.train(False)
    net.second.register_forward_hook(lambda module, taken, given: None)
    net.second.register_forward_pre_hook(lambda module, taken: None)
    net.head.register_full_backward_hook(lambda module, taken, given: None)
    net.tied.register_full_backward_pre_hook(lambda module, given: None)
    net.head.weight.register_hook(lambda gradient: gradient)
    return net


class Recurrent(nn.Module):
    """Recurrent layers hold a list of their weights beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(1, 2, batch_first=True), nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.guard: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.guard()
        self.calls += 1
        return self.head(self.layer(x.unsqueeze(-1))[0][:, -1])


def recurrent() -> Recurrent:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Recurrent().double().train()


NETS = {"everything": everything, "recurrent": recurrent}

# --- what must not change


def bits(value: Any) -> Any:
    """A tensor as something that equals another one only bit for bit."""
    return (value.dtype, value.detach().numpy().tobytes()) if isinstance(value, Tensor) else value


def portrait(net: nn.Module) -> dict[str, Any]:
    """Everything the modules hold: identity and bits of each tensor, its gradient, each attribute, each container."""
    seen: dict[str, Any] = {}
    for name, module in net.named_modules():
        seen[f"{name}: class"] = type(module)
        for key, value in vars(module).items():
            seen[f"{name}.{key}"] = (id(value), bits(value))
            if isinstance(value, dict | list | set):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                seen[f"{name}.{key} holds"] = [(at, id(item), bits(item)) for at, item in items]
    for name, p in [*net.named_parameters(), *net.named_buffers()]:
        seen[f"{name}: state"] = (p.requires_grad, p.is_leaf, id(p.grad), bits(p.grad))
    return seen


def randomness() -> list[Any]:
    legacy = np.random.get_state()  # noqa: NPY002 (the state that may not change)
    return [random.getstate(), legacy[0], legacy[1].tobytes(), *legacy[2:], bits(torch.get_rng_state())]


def settings() -> dict[str, Any]:
    back = torch.backends
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly": torch.is_anomaly_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "fastpath": back.mha.get_fastpath_enabled(),
        "mkldnn": (back.mkldnn.enabled, back.mkldnn.deterministic, back.mkldnn.allow_tf32),
        "cudnn": (back.cudnn.enabled, back.cudnn.benchmark, back.cudnn.deterministic, back.cudnn.allow_tf32),
        "flash": back.cuda.flash_sdp_enabled(),
        "efficient": back.cuda.mem_efficient_sdp_enabled(),
        "math": back.cuda.math_sdp_enabled(),
        "warnings": list(warnings.filters),
    }


@contextmanager
def untouched(net: nn.Module) -> Iterator[None]:
    """Nothing of a network, no random state and no setting may change within."""
    before, states, chosen, data = portrait(net), randomness(), settings(), (bits(X), bits(Y))
    yield
    assert settings() == chosen
    assert randomness() == states
    after = portrait(net)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == set()
    assert (bits(X), bits(Y)) == data
