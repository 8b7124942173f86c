"""The networks of the paper, by name and size: ``build("cnn", "small")``.

Sizes ``big``, ``med`` and ``small`` have the paper's widths; ``tiny`` (3 to 5 thousand weights) is ours, for
quick runs. Every network returns logits (or means), works under ``torch.func`` and leaves its inputs alone.
"""

from collections.abc import Callable, Mapping

from torch import nn

from experiments.architectures.cnns import cnn
from experiments.architectures.mlps import mlp, toy_mlp, toy_mlp_layernorm, uci_mlp, uci_mlp_layernorm
from experiments.architectures.resnets import biased_resnet, fixup_resnet, pre_resnet, resnet
from experiments.architectures.transformers import Transformer, transformer

__all__ = [
    "CLASSIFIERS", "Transformer", "biased_resnet", "build", "cnn", "count_weights", "fixup_resnet", "mlp",
    "pre_resnet", "resnet", "toy_mlp", "toy_mlp_layernorm", "transformer", "uci_mlp", "uci_mlp_layernorm",
]  # fmt: skip

_RESNET_WIDTHS = {"tiny": (8, 12, 16), "small": (12, 24, 32), "med": (16, 32, 64), "big": (22, 42, 64)}

# name -> (constructor, size -> its arguments); widths from the paper's tables of architecture parameters
CLASSIFIERS: Mapping[str, tuple[Callable[..., nn.Module], Mapping[str, tuple[int, ...]]]] = {
    "cnn": (cnn, {"tiny": (8, 16, 16), "small": (16, 32, 32), "med": (32, 32, 64), "big": (42, 48, 60)}),
    "resnet": (resnet, _RESNET_WIDTHS),
    "biased_resnet": (biased_resnet, _RESNET_WIDTHS),
    "pre_resnet": (pre_resnet, _RESNET_WIDTHS),
    "fixup_resnet": (fixup_resnet, _RESNET_WIDTHS),
    "transformer": (transformer, {"tiny": (16, 32), "small": (30, 60), "med": (40, 80), "big": (50, 120)}),
}


def build(arch: str, size: str) -> nn.Module:
    """A freshly initialised classifier of ten classes, in train mode."""
    constructor, sizes = CLASSIFIERS[arch]
    return constructor(*sizes[size])


def count_weights(net: nn.Module) -> int:
    """The number of trainable scalars of ``net``."""
    return sum(weight.numel() for weight in net.parameters() if weight.requires_grad)
