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
from torch.func import jacrev, jvp, vjp, vmap

from linlap.errors import InputError, NetworkError
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
            outputs, pull = self._recorded(inputs)

        def pulled(cotangent: Tensor) -> Tensor:
            with differentiable(self.network.module):
                return pull(cotangent)

        return outputs, pulled

    def _recorded(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """f and u ↦ Jᵀu by plain reverse mode, which every operation that can be trained has."""
        weights = {name: w.detach().requires_grad_() for name, w in self.network.weights.items()}
        with torch.enable_grad():
            outputs = self._flat(weights, inputs)
        if not outputs.requires_grad:
            raise NetworkError(
                "the network's outputs must be differentiable in the weights that get a posterior, but they carry no "
                "gradient: take torch.no_grad, detach and argmax out of forward, or choose other weights with `params`"
            )

        def pull(cotangent: Tensor) -> Tensor:
            own, u = list(weights.values()), cotangent.to(outputs.dtype)
            pulled = torch.autograd.grad(outputs, own, u, retain_graph=True, allow_unused=True, materialize_grads=True)
            return self.network.layout.join(dict(zip(weights, pulled, strict=True)))

        return outputs.detach(), pull

    def jacobian(self, inputs: Any) -> Tensor:
        """J `[n, C, P]` of every example by itself."""
        return self._by_examples(
            lambda: self._jacobian_by_examples(inputs).detach(), lambda: self._jacobian_by_outputs(inputs)
        )

    def pulled(self, inputs: Any, cotangents: Tensor) -> Tensor:
        """UᵀJ of every example by itself `[n, R, P]`, with R cotangents each, `[n, R, C]`."""
        return self._by_examples(
            lambda: self._pulled_by_examples(inputs, cotangents).detach(),
            lambda: cotangents.to(self.network.dtype) @ self._jacobian_by_outputs(inputs),
        )

    def _by_examples(self, together: Callable[[], Tensor], in_turn: Callable[[], Tensor]) -> Tensor:
        """All examples at once, or in turn where an operation does not allow it; not where both ways fail alike."""
        with differentiable(self.network.module):
            if self._vectorises:
                try:
                    return together()
                except (RuntimeError, NotImplementedError):
                    done = in_turn()
                    self.__dict__["_vectorises"] = False
                    return done
            return in_turn()

    def _pulled_by_examples(self, inputs: Any, cotangents: Tensor) -> Tensor:
        tensors = leaves(inputs)

        def one(own: Tensor, *example: Tensor) -> dict[str, Tensor]:
            alone = rebuild(inputs, [t.unsqueeze(0) for t in example])
            pull = vjp(lambda w: self._flat(w, alone).squeeze(0), self.network.weights)[1]
            return vmap(pull)(own)[0]

        pulled = vmap(one)(cotangents.to(self.network.dtype), *tensors)
        return self.network.layout.join(pulled, batch_axes=2)

    def _flat(self, weights: dict[str, Tensor], inputs: Any) -> Tensor:
        return self.network(weights, inputs).flatten(1)

    def _pushed(self, inputs: Any, tangent: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self._forward_mode:
            try:
                return jvp(lambda w: self._flat(w, inputs), (self.network.weights,), (tangent,))[:2]
            except (RuntimeError, NotImplementedError):
                self.outputs(inputs)  # it is the forward mode that fails, not the network on these inputs
                self.__dict__["_forward_mode"] = False
        if "_twice" not in self.__dict__:
            self.__dict__["_twice"] = self._reverses_twice(inputs)
        if self.__dict__["_twice"]:
            return self._pushed_backwards(inputs, tangent)
        return self.outputs(inputs), self.jacobian(inputs) @ self.network.layout.join(tangent)

    def _pushed_backwards(self, inputs: Any, tangent: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Jv as the derivative of u ↦ Jᵀu, for operations without a forward-mode rule (fused recurrent layers)."""
        weights = {name: w.detach().requires_grad_() for name, w in self.network.weights.items()}
        with torch.enable_grad():
            outputs = self._flat(weights, inputs)
            dummy = torch.zeros_like(outputs, requires_grad=True)
            pulled = torch.autograd.grad(outputs, list(weights.values()), dummy, create_graph=True, allow_unused=True)
            used = [(p, tangent[name]) for name, p in zip(weights, pulled, strict=True) if p is not None]
            pushed = torch.autograd.grad([p for p, _ in used], dummy, [t for _, t in used])[0]
        return outputs.detach(), pushed.detach()

    def _reverses_twice(self, inputs: Any) -> bool:
        """Can reverse mode be differentiated? An operation whose own derivative cannot may raise, or drop terms silently.

        Seen by ⟨u, Jv⟩ = ⟨Jᵀu, v⟩, whose right side needs one derivative only.
        """
        v = torch.arange(self.size, dtype=self.network.dtype, device=self.network.device).cos()
        try:
            pushed = self._pushed_backwards(inputs, self.network.layout.split(v))[1]
        except (RuntimeError, NotImplementedError):
            return False
        u = torch.arange(pushed.numel(), dtype=pushed.dtype, device=pushed.device).sin().reshape_as(pushed)
        pulled = self._recorded(inputs)[1](u)
        size = u.norm() * pushed.norm() + pulled.norm() * v.norm()
        return bool(((u * pushed).sum() - pulled @ v).abs() <= torch.finfo(v.dtype).eps ** 0.5 * size)

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
            outputs, pull = self._recorded(example)
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
    if not isinstance(net, Linearised):
        return Linearised(read(net, params))
    if params is not None:
        raise InputError(
            f"the weights are chosen where a network is linearised, but params={params!r} came with one that already is: "
            "pass params= to ll.linearise"
        )
    return net
