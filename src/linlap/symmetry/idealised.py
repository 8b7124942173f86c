"""The network as its symmetries see it: without epsilons, on batch statistics instead of running ones.

Epsilons blur the symmetry (by 1e-6 to 1e-4), and running statistics hide it: they are constants that would
have been other constants had the network been trained at another scale. Both are replaced while the network
runs, at the calls of `torch.nn.functional`, so that the user's modules need no change.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Statistics = Literal["batch", "running"]

TINY = 1e-16
"""In the place of an epsilon: below every variance that matters; a constant channel stays finite."""

LARGEST_EPSILON = 1e-3

_STATISTICS = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}
_NORMS = {f: inspect.signature(f) for f in (*_STATISTICS, F.layer_norm, F.group_norm, F.rms_norm)}
_ADDITIONS = frozenset((
    "add", "add_", "__add__", "__radd__", "__iadd__", "clamp", "clamp_", "clamp_min", "clamp_min_", "clip",
))  # fmt: skip


class Idealised(TorchFunctionMode):
    """Runs a network without epsilons, and on statistics of the batch or on its running ones."""

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        self.statistics = statistics

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace arguments of normalisations, and in hand-written ones the number added to a variance."""
        keywords = kwargs or {}
        if func in _NORMS:
            call = _NORMS[func].bind(*args, **keywords)
            self._idealise(func, call.arguments)
            return func(*call.args, **call.kwargs)
        if getattr(func, "__name__", "") in _ADDITIONS:
            args = tuple(map(_without_epsilon, args))
            keywords = {name: _without_epsilon(value) for name, value in keywords.items()}
        return func(*args, **keywords)

    def _idealise(self, func: Callable[..., Any], arguments: dict[str, Any]) -> None:
        arguments["eps"] = TINY
        if func not in _STATISTICS or arguments.get("running_var") is None:
            return
        if self.statistics == "running":  # the probe has added the epsilon to the running variance
            arguments["eps"] = torch.finfo(torch.float32).tiny
        elif _has_statistics(func, arguments["input"]):
            arguments |= {"running_mean": None, "running_var": None, _STATISTICS[func]: True}


def _has_statistics(func: Callable[..., Any], values: Tensor) -> bool:
    """Does each channel hold more than one value?"""
    channels = values.shape[1] if func is F.batch_norm else values.shape[0] * values.shape[1]
    return values.numel() > channels


def _without_epsilon(argument: Any) -> Any:
    return TINY if isinstance(argument, float) and TINY < argument <= LARGEST_EPSILON else argument
