"""Everything that is refused or warned about, what brings it about, and what is then said.

In the messages "…" stands for any text. All of them say the rule, what came, and what to do.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import linlap as ll

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(20, 3, generator=GENERATOR, dtype=torch.float64)
Y = X[:, :1].sin() + 0.1 * torch.randn(20, 1, generator=GENERATOR, dtype=torch.float64)
K = torch.arange(20) % 2
NAN, INF = torch.full((20, 3), torch.nan).double(), torch.full((20, 1), torch.inf).double()


class Refused(NamedTuple):
    """An error or a warning, what brings it about, and its message."""

    kind: type[Exception]
    trigger: Callable[[], Any]
    message: str


class Does(nn.Module):
    """A linear layer and whatever forward is to do with it."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Any], outputs: int = 1) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(3, outputs).double(), forward
        nn.init.constant_(self.layer.weight, 0.3)

    def forward(self, x: Any) -> Any:
        return self.does(self.layer, x)


def net(outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, outputs).double()


def reg(
    x: Any = X, y: Any = Y, module: Any = None, likelihood: Any = "regression", **options: Any
) -> Callable[[], Any]:
    return lambda: ll.fit(net() if module is None else module, (x, y), likelihood, progress=False, **options)


def cls(y: Any = K, module: Any = None, x: Any = X, likelihood: Any = "classification") -> Callable[[], Any]:
    return lambda: ll.fit(net(2) if module is None else module, (x, y), likelihood, progress=False)


def on(these: Any, module: Any = None) -> Callable[[], Any]:
    return lambda: ll.fit(net() if module is None else module, these, "regression", progress=False)


def does(forward: Callable[[nn.Module, Tensor], Any], **options: Any) -> Callable[[], Any]:
    return lambda: ll.fit(Does(forward, **options), (X, Y), "regression", progress=False)


@lru_cache
def regression() -> ll.Posterior:
    return reg()()


@lru_cache
def classification() -> ll.Posterior:
    return cls()()


def set_at(values: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    changed = values.clone()
    changed[at] = value
    return changed


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def in_batches(x: Tensor, y: Tensor = Y) -> list[tuple[Tensor, ...]]:
    return list(zip(x.split(5), y.split(5), strict=True))


def weighted(*weights: Any) -> Callable[[], Any]:
    return on([(X, Y, torch.as_tensor(weights, dtype=torch.float64).expand(20))])
