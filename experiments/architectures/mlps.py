"""Fully connected networks for regression, with or without layer norm before each activation."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

HIDDEN = (50, 50)

Norm = Callable[[int], nn.Module]


def affine_layer_norm(width: int) -> nn.LayerNorm:
    """Layer norm with gain and bias."""
    return nn.LayerNorm(width)


def plain_layer_norm(width: int) -> nn.LayerNorm:
    """Layer norm without weights of its own."""
    return nn.LayerNorm(width, elementwise_affine=False)


def mlp(widths: Sequence[int], norm: Norm | None = None) -> nn.Sequential:
    """Linear (-> norm) -> ReLU for every hidden width, then Linear; biases everywhere."""
    net = nn.Sequential()
    for layer, (width_in, width_out) in enumerate(pairwise(widths[:-1]), start=1):
        net.add_module(f"linear{layer}", nn.Linear(width_in, width_out))
        if norm is not None:
            net.add_module(f"norm{layer}", norm(width_out))
        net.add_module(f"relu{layer}", nn.ReLU())
    net.add_module("head", nn.Linear(widths[-2], widths[-1]))
    return net


def toy_mlp() -> nn.Sequential:
    """1-50-50-1 of the paper's one-dimensional figures: 2701 weights, the paper's 2.6k without the biases."""
    return mlp((1, *HIDDEN, 1))


def toy_mlp_layernorm() -> nn.Sequential:
    """The same with layer norm. Inferred: without gain and bias, since the paper counts 2.6k here too."""
    return mlp((1, *HIDDEN, 1), plain_layer_norm)


def uci_mlp(features: int) -> nn.Sequential:
    """d-50-50-1."""
    return mlp((features, *HIDDEN, 1))


def uci_mlp_layernorm(features: int) -> nn.Sequential:
    """d-50-50-1 with affine layer norm."""
    return mlp((features, *HIDDEN, 1), affine_layer_norm)
