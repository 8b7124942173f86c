"""Networks with and without normalised weights, and short ways to ask what detection finds in them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linlap.features import linearise
from linlap.symmetry import detect

STATISTICS = "with co-scaled statistics"


def settled(net: nn.Module, X: Tensor) -> nn.Module:
    """Away from the initial values, in float64, with running statistics of X."""
    generator = torch.Generator().manual_seed(1)
    net = net.double().train()
    with torch.no_grad():
        for p in net.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.mul_(1 + 0.2 * noise).add_(0.1 * noise.flip(0) if p.ndim else 0)
        for _ in range(20):
            net(X)
    return net.eval()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def found(net: nn.Module, X, params=None):
    return detect(linearise(net, params), X)


def groups(symmetries) -> list[tuple[str, ...]]:
    return [group.names for group in symmetries.normalised]


def exponents(symmetries) -> list[dict[str, float]]:
    return [dict(r.exponents) for r in symmetries.rescalings]


def both(*layers: str) -> list[tuple[str, str]]:
    return [(f"{layer}.weight", f"{layer}.bias") for layer in layers]


class Single(nn.Module):
    def __init__(self, norm: nn.Module, layer: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm, self.head = layer, norm, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.layer(x))).flatten(1))


def dense(norm: nn.Module) -> tuple[nn.Module, Tensor]:
    return Single(norm, nn.Linear(3, 4), nn.Linear(4, 2)), normal(20, 3)


def image(norm: nn.Module, bias: bool = True) -> tuple[nn.Module, Tensor]:
    return Single(norm, nn.Conv2d(1, 4, 3, bias=bias), nn.Linear(36, 2)), normal(20, 1, 5, 5)


class Block(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, width, width, 3, padding=1, bias=bias)
        self.norm1, self.conv1 = nn.BatchNorm2d(width), conv()
        self.norm2, self.conv2 = nn.BatchNorm2d(width), conv()
        self.shortcut = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


class PreResNet(nn.Module):
    def __init__(self, final: nn.Module, bias: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, bias=bias)
        self.blocks, self.final, self.head = (
            nn.Sequential(Block(3, bias), Block(3, bias)),
            final,
            nn.Linear(3, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.final(self.blocks(self.stem(x)))).mean((2, 3)))


TRUNK = ("stem.weight", "blocks.0.conv2.weight", "blocks.1.conv2.weight")


class Encoder(nn.Module):
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, norm_first=norm_first)
        self.embedding, self.layer = nn.Embedding(7, 4), layer
        self.final, self.head = (nn.LayerNorm(4) if norm_first else nn.Identity()), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.final(self.layer(self.embedding(tokens))).mean(1))
