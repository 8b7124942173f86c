"""The paper's residual networks for images ``[b, 1, 28, 28]``: ResNet, biased, Pre-ResNet and FixUp.

All share one trunk: a strided 5x5 stem, a residual block, a strided 1x1 convolution (neither bias nor norm),
a second block, a second 1x1 convolution, the global average and a dense layer. The paper does not spell this
layout out; it reproduces the paper's weight counts exactly.
"""

from math import sqrt

import torch
from torch import Tensor, nn

from experiments.architectures.parts import CLASSES, GlobalAverage, named

BLOCKS = 2


class Residual(nn.Module):
    """``activation(x + branch(x))``."""

    def __init__(self, branch: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x + self.branch(x))


class Shift(nn.Module):
    """``x + bias`` with one scalar: the offset of FixUp."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Scale(nn.Module):
    """``x * scale`` with one scalar: the multiplier of FixUp."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _conv5(width: int, *, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(1, width, 5, stride=2, padding=2, bias=bias)


def _conv3(width: int, *, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(width, width, 3, padding=1, bias=bias)


def _conv1(width_in: int, width_out: int) -> nn.Conv2d:
    return nn.Conv2d(width_in, width_out, 1, stride=2, bias=False)


def _stem(width: int, *, bias: bool = False) -> nn.Sequential:
    return named(conv=_conv5(width, bias=bias), norm=nn.BatchNorm2d(width), relu=nn.ReLU())


def _block(width: int, *, bias: bool = False) -> Residual:
    branch = named(
        conv1=_conv3(width, bias=bias), norm1=nn.BatchNorm2d(width), relu=nn.ReLU(),
        conv2=_conv3(width, bias=bias), norm2=nn.BatchNorm2d(width),
    )  # fmt: skip
    return Residual(branch, nn.ReLU())


def _pre_block(width: int) -> Residual:
    branch = named(
        norm1=nn.BatchNorm2d(width), relu1=nn.ReLU(), conv1=_conv3(width),
        norm2=nn.BatchNorm2d(width), relu2=nn.ReLU(), conv2=_conv3(width),
    )  # fmt: skip
    return Residual(branch, nn.Identity())


def _fixup_block(width: int) -> Residual:
    """Five scalars a block; the first convolution is scaled by depth^(-1/2), the second starts at zero."""
    conv1, conv2 = _conv3(width), _conv3(width)
    nn.init.normal_(conv1.weight, std=sqrt(2 / (9 * width)) / sqrt(BLOCKS))
    nn.init.zeros_(conv2.weight)
    branch = named(
        bias1a=Shift(), conv1=conv1, bias1b=Shift(), relu=nn.ReLU(),
        bias2a=Shift(), conv2=conv2, scale=Scale(), bias2b=Shift(),
    )  # fmt: skip
    return Residual(branch, nn.ReLU())


def resnet(width1: int, width2: int, width3: int) -> nn.Sequential:
    """Batch norm after every 5x5 and 3x3 convolution: 45 576 / 26 874 / 14 814 weights."""
    return named(
        stem=_stem(width1),
        block1=_block(width1), down1=_conv1(width1, width2),
        block2=_block(width2), down2=_conv1(width2, width3),
        pool=GlobalAverage(), head=nn.Linear(width3, CLASSES),
    )  # fmt: skip


def biased_resnet(width1: int, width2: int, width3: int) -> nn.Sequential:
    """The ResNet with a bias in its five 5x5 and 3x3 convolutions: 45 726 / 26 986 / 14 898 weights."""
    return named(
        stem=_stem(width1, bias=True),
        block1=_block(width1, bias=True), down1=_conv1(width1, width2),
        block2=_block(width2, bias=True), down2=_conv1(width2, width3),
        pool=GlobalAverage(), head=nn.Linear(width3, CLASSES),
    )  # fmt: skip


def pre_resnet(width1: int, width2: int, width3: int) -> nn.Sequential:
    """Batch norm and ReLU before each 3x3 convolution, no final norm: as many weights as the ResNet."""
    return named(
        stem=_stem(width1),
        block1=_pre_block(width1), down1=_conv1(width1, width2),
        block2=_pre_block(width2), down2=_conv1(width2, width3),
        pool=GlobalAverage(), head=nn.Linear(width3, CLASSES),
    )  # fmt: skip


def fixup_resnet(width1: int, width2: int, width3: int) -> nn.Sequential:
    """The ResNet with FixUp (Zhang et al., 2019) for batch norm: 45 288 / 26 662 / 14 658 weights.

    The paper gives no count. Inferred: FixUp's five scalars in each block, one after the stem and one before
    the dense layer, which starts at zero; stem and trunk convolutions keep their ordinary initialisation.
    """
    head = nn.Linear(width3, CLASSES)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return named(
        stem=named(conv=_conv5(width1), bias1=Shift(), relu=nn.ReLU()),
        block1=_fixup_block(width1), down1=_conv1(width1, width2),
        block2=_fixup_block(width2), down2=_conv1(width2, width3),
        pool=GlobalAverage(), bias2=Shift(), head=head,
    )  # fmt: skip
