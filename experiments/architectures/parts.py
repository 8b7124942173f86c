"""Parts that several networks share."""

from collections import OrderedDict

from torch import Tensor, nn

CLASSES = 10


def named(**modules: nn.Module) -> nn.Sequential:
    """A chain of modules with names instead of numbers."""
    return nn.Sequential(OrderedDict(modules))


class GlobalAverage(nn.Module):
    """The mean over space: ``[b, c, h, w]`` to ``[b, c]``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(-2, -1))
