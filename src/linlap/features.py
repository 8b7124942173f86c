"""The network linearised at its weights: jvp, vjp and Jacobians of f at θ̃.

`model="linear"` is h(θ) = J θ (the paper's simple model), `model="affine"` the Taylor model
h(θ) = f + J (θ − θ̃). Both share the features J; only the offset c in h = c + J θ differs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vjp, vmap

from linlap.network import Chosen, Network, read
from linlap.state import differentiable
from linlap.tree import count, leaves, rebuild

Model = Literal["linear", "affine"]


@dataclass(frozen=True)
class Linearised:
    """Features J(x) = ∂f(θ̃, x)/∂θ of a network, read once and never written.

    Outputs are flat, `[n, C]`; weights are flat vectors `[P]` in the order of `network.layout`.
    """

    network: Network

    @property
    def size(self) -> int:
        """P."""
        return self.network.layout.size

    def outputs(self, inputs: Any) -> Tensor:
        """f(θ̃, inputs) `[n, C]`."""
        return self.shaped_outputs(inputs).flatten(1)

    def shaped_outputs(self, inputs: Any) -> Tensor:
        """f(θ̃, inputs) `[n, ...]`, in the network's own shape."""
        with torch.no_grad(), differentiable(self.network.module):
            return self.network(self.network.weights, inputs)

    def outputs_at(self, weights: Tensor, inputs: Any) -> Tensor:
        """f(weights, inputs) `[n, C]` at other weights `[P]`."""
        with torch.no_grad(), differentiable(self.network.module):
            return self._flat(self.network.layout.split(weights), inputs)

    def jvp(self, inputs: Any, vector: Tensor) -> tuple[Tensor, Tensor]:
        """f and J·vector, both `[n, C]`, from vector `[P]`."""
        tangent = self.network.layout.split(vector.to(self.network.dtype))
        with differentiable(self.network.module):
            outputs, pushed = self._pushed(inputs, tangent)
        return outputs.detach(), pushed.detach()

    def vjp(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """f `[n, C]` and the map u `[n, C]` ↦ Jᵀu `[P]`."""
        with differentiable(self.network.module):
            outputs, pull = vjp(lambda w: self._flat(w, inputs), self.network.weights)[:2]
        join = self.network.layout.join

        def pulled(cotangent: Tensor) -> Tensor:
            with differentiable(self.network.module):
                return join(pull(cotangent.to(outputs.dtype))[0]).detach()

        return outputs.detach(), pulled

    def jacobian(self, inputs: Any) -> Tensor:
        """J `[n, C, P]` of every example by itself."""
        with differentiable(self.network.module):
            if self._vectorises:
                try:
                    return self._jacobian_by_examples(inputs).detach()
                except (RuntimeError, NotImplementedError):
                    self.__dict__["_vectorises"] = False
            return self._jacobian_by_outputs(inputs)

    def pulled(self, inputs: Any, cotangents: Tensor) -> Tensor:
        """uᵀJ of every example by itself `[n, P]`, one cotangent u each `[n, C]`."""
        with differentiable(self.network.module):
            if self._vectorises:
                try:
                    return self._pulled_by_examples(inputs, cotangents).detach()
                except (RuntimeError, NotImplementedError):
                    self.__dict__["_vectorises"] = False
            return torch.einsum("nc,ncp->np", cotangents.to(self.network.dtype), self._jacobian_by_outputs(inputs))

    def _pulled_by_examples(self, inputs: Any, cotangents: Tensor) -> Tensor:
        def one(weights: dict[str, Tensor], cotangent: Tensor, *example: Tensor) -> Tensor:
            alone = rebuild(inputs, [t.unsqueeze(0) for t in example])
            return (self._flat(weights, alone).squeeze(0) * cotangent).sum()

        tensors = leaves(inputs)
        rows = vmap(grad(one), in_dims=(None, 0, *[0] * len(tensors)))
        pulled = rows(self.network.weights, cotangents.to(self.network.dtype), *tensors)
        return self.network.layout.join(pulled, batch_axes=1)

    def _flat(self, weights: dict[str, Tensor], inputs: Any) -> Tensor:
        return self.network(weights, inputs).flatten(1)

    def _pushed(self, inputs: Any, tangent: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self._forward_mode:
            try:
                return jvp(lambda w: self._flat(w, inputs), (self.network.weights,), (tangent,))[:2]
            except (RuntimeError, NotImplementedError):
                self.__dict__["_forward_mode"] = False
        return self._pushed_backwards(inputs, tangent)

    def _pushed_backwards(self, inputs: Any, tangent: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Jv as the derivative of u ↦ Jᵀu, for operations without a forward-mode rule (fused recurrent layers)."""
        weights = {name: w.clone().requires_grad_() for name, w in self.network.weights.items()}
        with torch.enable_grad():
            outputs = self._flat(weights, inputs)
            dummy = torch.zeros_like(outputs, requires_grad=True)
            pulled = torch.autograd.grad(outputs, list(weights.values()), dummy, create_graph=True, allow_unused=True)
            used = [(p, tangent[name]) for name, p in zip(weights, pulled, strict=True) if p is not None]
            pushed = torch.autograd.grad([p for p, _ in used], dummy, [t for _, t in used], allow_unused=True)[0]
        return outputs.detach(), torch.zeros_like(outputs) if pushed is None else pushed.detach()

    @cached_property
    def _forward_mode(self) -> bool:
        """Is forward mode to be tried? Set to False when the network turns out to lack it."""
        return True

    @cached_property
    def _vectorises(self) -> bool:
        """Is `vmap` over the examples to be tried? Set to False when an operation turns out not to allow it."""
        return True

    def _jacobian_by_examples(self, inputs: Any) -> Tensor:
        tensors = leaves(inputs)

        def one(weights: dict[str, Tensor], *example: Tensor) -> Tensor:
            return self._flat(weights, rebuild(inputs, [t.unsqueeze(0) for t in example])).squeeze(0)

        rows = vmap(jacrev(one), in_dims=(None, *[0] * len(tensors)))(self.network.weights, *tensors)
        return self.network.layout.join(rows, batch_axes=2)

    def _jacobian_by_outputs(self, inputs: Any) -> Tensor:
        """Example by example and output by output, for operations that cannot be vectorised."""
        rows = []
        for i in range(count(inputs)):
            example = rebuild(inputs, [t[i : i + 1] for t in leaves(inputs)])
            outputs, pull = self.vjp(example)
            basis = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
            rows.append(torch.stack([pull(row.unsqueeze(0)) for row in basis]))
        return torch.stack(rows)


def linearise(net: nn.Module | Linearised, params: Chosen = None) -> Linearised:
    """Linearise a trained network at its weights.

    The network is read in eval mode, copied where it must be, and never changed.

    Args:
        net: any `torch.nn.Module`.
        params: which weights get a posterior: None for all with `requires_grad`, `"weights"`, `"last_layer"`, or a
            predicate `(name, parameter) -> bool`.

    Example:
        >>> import linlap as ll, torch
        >>> ll.linearise(torch.nn.Linear(3, 1)).jacobian(torch.eye(3)).shape
        torch.Size([3, 1, 4])
    """
    return net if isinstance(net, Linearised) else Linearised(read(net, params))
