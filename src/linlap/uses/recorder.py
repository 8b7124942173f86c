"""Watches a forward pass: which operation is given which weight."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from linlap.features import Linearised
from linlap.state import differentiable
from linlap.uses.operations import RULES, TRANSPOSES, Handle, Use


class Recorder(TorchFunctionMode):
    """Notes every use of some weights, recognised by the tensors themselves."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.handles = {id(tensor): Handle(name) for name, tensor in weights.items()}
        self.kept = list(weights.values())  # an id belongs to a tensor only while it lives
        self.uses: list[Use] = []

    def find(self, value: Any) -> Handle | None:
        """The weight that a tensor is."""
        return self.handles.get(id(value)) if isinstance(value, Tensor) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and note what it made of the weights."""
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with _opened(), self:  # it is made of operations that are watched themselves
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None and isinstance(output, Tensor) and output.requires_grad:
            self.uses += rule(self.find, output, *args, **kwargs)
        elif func in TRANSPOSES and (handle := self.find(args[0])) is not None and args[0].ndim == 2:
            self.handles[id(output)] = Handle(handle.name, not handle.transposed)
            self.kept.append(output)
        return output


@contextmanager
def _opened() -> Iterator[None]:
    """Let a function of `torch.nn.functional` run its body although it is watched."""
    name = "has_torch_function"
    asked = getattr(functional, name)
    setattr(functional, name, lambda _: False)
    try:
        yield
    finally:
        setattr(functional, name, asked)


class Watched:
    """One forward pass of a linearised network with the uses of its weights; its graph lives as long as this."""

    def __init__(self, linearised: Linearised, inputs: Any) -> None:
        self.network = linearised.network
        self.weights = {name: w.detach().requires_grad_() for name, w in self.network.weights.items()}
        recorder = Recorder(self.weights)
        with differentiable(self.network.module), torch.enable_grad(), recorder:
            self.outputs = self.network(self.weights, inputs).flatten(1)
        self.uses = recorder.uses

    def gradients(self, cotangents: Tensor, uses: list[Use]) -> list[Tensor]:
        """Gradients at the outputs of these uses, from cotangents `[n, C]` of the network's outputs."""
        edges = [use.edge for use in uses]
        u = cotangents.to(self.outputs.dtype)
        with differentiable(self.network.module):
            found = torch.autograd.grad(self.outputs, edges, u, retain_graph=True, allow_unused=True)
        return [u.new_zeros(use.output) if g is None else g.detach() for use, g in zip(uses, found, strict=True)]

    def weight_gradients(self, cotangents: Tensor) -> dict[str, Tensor]:
        """Of the weights themselves, by plain reverse mode."""
        u, own = cotangents.to(self.outputs.dtype), list(self.weights.values())
        with differentiable(self.network.module):
            found = torch.autograd.grad(
                self.outputs, own, u, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        return dict(zip(self.weights, found, strict=True))
