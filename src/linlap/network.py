"""The user's module as a pure function of named weights; the module itself is only ever read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from linlap.errors import InputError, NetworkError, NothingToLearnError
from linlap.state import evaluating
from linlap.tree import map_leaves

Weights = dict[str, Tensor]
Chosen = None | str | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Layout:
    """Where each named weight lies in the flat vector of all P weights."""

    shapes: dict[str, torch.Size]

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Name → its part of the flat vector."""
        places, start = {}, 0
        for name, shape in self.shapes.items():
            places[name] = slice(start, start + shape.numel())
            start += shape.numel()
        return places

    @property
    def size(self) -> int:
        """P, the number of weights."""
        return sum(shape.numel() for shape in self.shapes.values())

    def split(self, flat: Tensor) -> Weights:
        """A flat vector `[..., P]` as named tensors `[..., *shape]`."""
        return {
            name: flat[..., place].reshape((*flat.shape[:-1], *self.shapes[name]))
            for name, place in self.slices.items()
        }

    def join(self, weights: Mapping[str, Tensor], batch_axes: int = 0) -> Tensor:
        """Named tensors `[..., *shape]` as one flat vector `[..., P]`."""
        parts = [weights[name] for name in self.shapes]
        return torch.cat([part.reshape(*part.shape[:batch_axes], -1) for part in parts], dim=-1)


@dataclass(frozen=True)
class Network:
    """f(weights, inputs): the module with its weights named, its buffers and other weights frozen.

    The weights have one type, the widest; the module gets each in its own of `types`, never below float32.

    `weights` and `frozen` are copies made when the network was read, so training it further does not reach them.
    Tied weights appear once, under the name `named_parameters` gives them.
    """

    module: nn.Module
    weights: Weights
    frozen: Weights
    types: dict[str, torch.dtype] = field(default_factory=dict)

    @cached_property
    def layout(self) -> Layout:
        """The order of the weights in flat vectors."""
        return Layout({name: w.shape for name, w in self.weights.items()})

    @cached_property
    def trained(self) -> Tensor:
        """θ̃ `[P]`, flat."""
        return self.layout.join(self.weights)

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type the linearisation runs in: never below float32."""
        return self.trained.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.trained.device

    def __call__(self, weights: Weights, inputs: Any) -> Tensor:
        """f(weights, inputs) `[n, ...]`, differentiable in `weights`."""
        arguments, keywords = arguments_of(map_leaves(self._lent_input, inputs))
        own = {name: w.to(self.types.get(name, w.dtype)) for name, w in weights.items()}
        output = functional_call(self.module, self._lent({**self.frozen, **own}), arguments, keywords)
        return tensor_of(output)

    def as_trained(self, inputs: Any) -> Tensor:
        """What the user's own network returns `[n, ...]`, computed as the user would: no graph, eval mode.

        Fused recurrent layers round differently where their weights are passed in, so that a module with such layers
        keeps its own as long as they are those it was read with.
        """
        arguments, keywords = arguments_of(map_leaves(torch.clone, inputs))
        with torch.no_grad(), evaluating(self.module):
            own = self._recurrent and self._unchanged()
            tensors = {name: self.as_stored[name] for name in self._buffers} if own else self.as_stored
            return tensor_of(functional_call(self.module, self._lent(tensors), arguments, keywords))

    @cached_property
    def _recurrent(self) -> bool:
        return any(isinstance(m, nn.RNNBase) for m in self.module.modules())

    def _unchanged(self) -> bool:
        now = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return all(torch.equal(now[name], w) for name, w in self.as_stored.items())

    @cached_property
    def as_stored(self) -> Weights:
        """All weights and buffers in the module's own types, as they were when it was read."""
        types = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return {name: w.to(types[name].dtype) for name, w in {**self.frozen, **self.weights}.items()}

    @cached_property
    def _buffers(self) -> frozenset[str]:
        return frozenset(self.frozen) - {name for name, _ in self.module.named_parameters()}

    def _lent(self, tensors: Weights) -> Weights:
        """The same tensors, buffers as copies: a forward may write to those, even in eval mode."""
        return {name: tensor.clone() if name in self._buffers else tensor for name, tensor in tensors.items()}

    def _lent_input(self, tensor: Tensor) -> Tensor:
        """A copy, which a forward may write to, never narrower than float32."""
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        return tensor.to(self.dtype) if half else tensor.clone()


def read(module: nn.Module, params: Chosen = None) -> Network:
    """Copy the module's weights and buffers, those that get a posterior apart from those that do not."""
    _usable(module)
    parameters = dict(module.named_parameters())
    chosen = chosen_names(module, parameters, params)
    if not chosen:
        raise NothingToLearnError(
            f"at least one weight must get a posterior, but none of the {len(parameters)} parameters qualifies "
            f"(params={params!r}): set requires_grad on some of them, or choose others with `params`"
        )
    wide = torch.float64 if any(parameters[n].dtype == torch.float64 for n in chosen) else torch.float32
    with torch.inference_mode(mode=False):  # else the copies could never be differentiated
        copied = {name: _copy(tensor, wide) for name, tensor in [*parameters.items(), *module.named_buffers()]}
    return Network(
        module,
        weights={name: copied[name].to(wide) for name in chosen},
        frozen={name: tensor for name, tensor in copied.items() if name not in chosen},
        types={name: copied[name].dtype for name in chosen},
    )


def _usable(module: nn.Module) -> None:
    """Refuse what cannot be called with other weights."""
    if not isinstance(module, nn.Module):
        raise InputError(f"net must be a torch.nn.Module, but it is a {type(module).__name__}: pass the network itself")
    if isinstance(module, torch.jit.ScriptModule | nn.DataParallel):
        raise NetworkError(
            f"the network must be the module itself, but it is a {type(module).__name__}, which keeps its weights to itself: "
            "pass net.module of a DataParallel, and the original of a scripted or traced network"
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise NetworkError(
            "every weight must have a shape, but some of the network's lazy layers have none yet: call the network once on an "
            "input first"
        )


def _copy(tensor: Tensor, wide: torch.dtype) -> Tensor:
    """Half-precision tensors are widened: their rounding would drown the derivatives."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to(wide).clone() if half else tensor.detach().clone()


def chosen_names(module: nn.Module, parameters: Mapping[str, nn.Parameter], params: Chosen) -> list[str]:
    """The names of the weights that get a posterior."""
    if params is None:
        return [name for name, p in parameters.items() if p.requires_grad]
    if params == "weights":
        return [n for n, p in parameters.items() if p.requires_grad and "bias" not in n.rsplit(".", 1)[-1]]
    if params == "last_layer":
        return last_layer(module)
    if callable(params):
        return [name for name, p in parameters.items() if params(name, p)]
    raise InputError(
        f'params must be None, "weights", "last_layer" or a predicate (name, parameter) -> bool, but it is {params!r}: '
        "choose one of these"
    )


def last_layer(module: nn.Module) -> list[str]:
    """Names of the weights of the last module, in the order of definition, that holds any itself.

    Tied weights go by the name they have in `named_parameters`; what a parametrised weight is made of belongs to its module.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    holders: dict[str, list[str]] = {}
    for path, p in module.named_parameters(remove_duplicate=False):
        owner = path.rpartition(".")[0].partition("parametrizations.")[0].rstrip(".")
        if p.requires_grad:
            holders.setdefault(owner, []).append(names[id(p)])
    defined = [owner for owner, _ in module.named_modules(remove_duplicate=False) if owner in holders]
    return holders[defined[-1]] if defined else []


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor is passed as it is, a tuple or list as positional arguments, a mapping as keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def tensor_of(output: Any) -> Tensor:
    """The output tensor: the network's own, or its `logits`, with an axis for the one output of squeezed examples."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    logits = getattr(output, "logits", None)
    output = output if logits is None else logits
    if not isinstance(output, Tensor):
        raise NetworkError(
            f"the network must return a tensor, or an object or dict with `logits`, but it returned a "
            f"{type(output).__name__}: wrap it in a module that returns the tensor to predict"
        )
    return output.reshape(-1, 1) if output.ndim < 2 else output
