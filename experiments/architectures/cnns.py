"""The paper's CNN: three strided convolutions with batch norm, global average, dense layer."""

from torch import nn

from experiments.architectures.parts import CLASSES, GlobalAverage, named


def _conv(width_in: int, width_out: int, kernel: int) -> nn.Conv2d:
    return nn.Conv2d(width_in, width_out, kernel, stride=2, padding=kernel // 2, bias=False)


def cnn(width1: int, width2: int, width3: int) -> nn.Sequential:
    """Conv -> ReLU -> BatchNorm three times, for images ``[b, 1, 28, 28]``.

    Convolutions have no bias and batch norm is affine: 46 024 / 29 354 / 14 714 weights. The paper prints
    46 024 / 29 226 / 14 634: its two smaller counts are those of one vector a channel instead of two.
    """
    return named(
        conv1=_conv(1, width1, 5), relu1=nn.ReLU(), norm1=nn.BatchNorm2d(width1),
        conv2=_conv(width1, width2, 3), relu2=nn.ReLU(), norm2=nn.BatchNorm2d(width2),
        conv3=_conv(width2, width3, 3), relu3=nn.ReLU(), norm3=nn.BatchNorm2d(width3),
        pool=GlobalAverage(), head=nn.Linear(width3, CLASSES),
    )  # fmt: skip
