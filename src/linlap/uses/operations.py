"""What each operation makes of the weights it is given: the two sides of their gradient's outer products.

A rule is a function of an operation's arguments and its output; it yields `Use`s. The output's gradient comes later: a
`Use` holds the edge of the graph at which it will be found, and how to make a term of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from linlap.uses.outer import Outer, Term, Tokens

Shape = tuple[int, int, int]
Arrange = Callable[[Tensor], Tensor]
"""`[...]` as `[n, m, ...]`: examples first, then the places that were folded into the batch axis."""


@dataclass(frozen=True)
class Handle:
    """A weight, as it is or transposed."""

    name: str
    transposed: bool = False


@dataclass(frozen=True)
class Use:
    """One use of a weight.

    `shape` (G, L, R) is how the weight, as it lies in memory, is seen as G matrices; `term` makes outer products of the
    output's gradient, once it is known where the examples are.
    """

    name: str
    shape: Shape
    output: tuple[int, ...]
    edge: GradientEdge
    term: Callable[[Tensor, Arrange], Term]


def once(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What is made when it is first asked for, and kept."""
    made: list[Tensor] = []

    def get() -> Tensor:
        if not made:
            made.append(make())
        return made[0]

    return get


Lookup = Callable[[Any], Handle | None]


def _use(handle: Handle, shape: Shape, output: Tensor, term: Callable[[Tensor, Arrange], Term]) -> Use:
    return Use(handle.name, shape, tuple(output.shape), get_gradient_edge(output), term)


# ---- matrices --------------------------------------------------------------------------------------------


def _rows(side: Tensor, arrange: Arrange) -> Tensor:
    """`[..., d]` as `[n, T, 1, d]`."""
    placed = arrange(side)
    return placed.reshape(len(placed), -1, 1, side.shape[-1])


def product(find: Lookup, output: Tensor, x: Tensor, weight: Any, handle: Handle | None = None) -> Iterator[Use]:
    """x·W, with W as it lies in memory `[in, out]`, or transposed `[out, in]`."""
    handle = handle or find(weight)
    if handle is None or x.ndim < 2:
        return
    into, out, x = x.shape[-1], output.shape[-1], x.detach()
    if handle.transposed:
        yield _use(handle, (1, out, into), output, lambda g, by: Outer(_rows(g, by), _rows(x, by)))
    else:
        yield _use(handle, (1, into, out), output, lambda g, by: Outer(_rows(x, by), _rows(g, by)))


def linear(find: Lookup, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Iterator[Use]:
    """x·Wᵀ + b."""
    if (handle := find(weight)) is not None:
        yield from product(find, output, x, weight, replace(handle, transposed=not handle.transposed))
    yield from shift(find, output, bias)


def addmm(find: Lookup, output: Tensor, bias: Tensor, x: Tensor, weight: Tensor, **scales: Any) -> Iterator[Use]:
    """b + x·W."""
    if not scales:
        yield from product(find, output, x, weight)
        yield from shift(find, output, bias)


def embedding(
    find: Lookup, output: Tensor, tokens: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> Iterator[Use]:
    """Rows of a table; that of the padding has no gradient."""
    handle = find(weight)
    if handle is not None and not handle.transposed:
        count, width = weight.shape
        padding = None if padding_idx is None else padding_idx % count

        def term(g: Tensor, by: Arrange) -> Tokens:
            placed = by(tokens)
            known = g if padding is None else g * (tokens != padding).unsqueeze(-1)
            return Tokens(placed.reshape(len(placed), -1), _rows(known, by), count)

        yield _use(handle, (1, count, width), output, term)


# ---- convolutions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Where the taps of a convolution are."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    def patches(self, image: Tensor, places: torch.Size) -> Tensor:
        """What each of the places `[...]` of the smaller side sees: `[n, ..., channels·taps]`, channels first."""
        n, channels, dims = len(image), image.shape[1], len(self.kernel)
        padded = functional.pad(image, [p for pair in reversed(self.padding) for p in pair])
        taps = []
        for offset in torch.cartesian_prod(*(torch.arange(k) for k in self.kernel)).reshape(-1, dims).tolist():
            index = [
                slice(o * d, o * d + s * (size - 1) + 1, s)
                for o, d, s, size in zip(offset, self.dilation, self.stride, places, strict=True)
            ]
            taps.append(padded[(slice(None), slice(None), *index)])
        return torch.stack(taps, 2).reshape(n, channels * len(taps), *places).movedim(1, -1)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


def _pads(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Before and after, on each axis."""
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in total)
    return tuple((p, p) for p in _tuple(0 if padding == "valid" else padding, len(kernel)))


def _per_group(side: Tensor, groups: int, arrange: Arrange) -> Tensor:
    """`[n·m, ..., G·d]` as `[n, T, G, d]`."""
    placed = arrange(side)
    return placed.reshape(len(placed), -1, groups, side.shape[-1] // groups)


def convolution(
    find: Lookup, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Iterator[Use]:  # fmt: skip
    """Each place of the output sees a patch of the input."""
    dims, handle = weight.ndim - 2, find(weight)
    if handle is not None and x.ndim == weight.ndim:
        kernel, dilated = tuple(weight.shape[2:]), _tuple(dilation, dims)
        window = Window(kernel, _tuple(stride, dims), _pads(padding, kernel, dilated), dilated)
        seen = once(partial(window.patches, x.detach(), output.shape[2:]))

        def term(g: Tensor, by: Arrange) -> Outer:
            return Outer(_per_group(g.movedim(1, -1), groups, by), _per_group(seen(), groups, by))

        yield _use(handle, (groups, len(weight) // groups, weight[0].numel()), output, term)
    yield from shift(find, output, bias, axis=1)


def transposed_convolution(
    find: Lookup, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,  # noqa: ARG001
) -> Iterator[Use]:  # fmt: skip
    """Each place of the input sees a patch of the output."""
    dims, handle = weight.ndim - 2, find(weight)
    if handle is not None and x.ndim == weight.ndim:
        kernel, dilated = tuple(weight.shape[2:]), _tuple(dilation, dims)
        window = Window(kernel, _tuple(stride, dims), _pads(padding, kernel, dilated), dilated)
        places, x = x.shape[2:], x.detach()

        def term(g: Tensor, by: Arrange) -> Outer:
            left, right = x.movedim(1, -1), window.patches(g, places)
            return Outer(_per_group(left, groups, by), _per_group(right, groups, by))

        yield _use(handle, (groups, len(weight) // groups, weight[0].numel()), output, term)
    yield from shift(find, output, bias, axis=1)


# ---- numbers ---------------------------------------------------------------------------------------------


def _summed(product: Tensor, arrange: Arrange, shape: torch.Size) -> Outer:
    """A product `[n·m, ...]` summed, for each example, to what was broadcast to it: `[n, 1, 1, d]` beside ones."""
    placed = arrange(product)  # [n, m, ...]
    padded = (1,) * (product.ndim - len(shape)) + tuple(shape)
    whole = placed if padded[0] > 1 else placed.sum(1, keepdim=True)
    axes = [axis + 1 for axis in range(1, product.ndim) if padded[axis] == 1 and product.shape[axis] > 1]
    summed = whole.sum(axes) if axes else whole
    row = summed.reshape(len(placed), 1, 1, shape.numel())
    return Outer(torch.ones_like(row[..., :1]), row)


def shift(find: Lookup, output: Tensor, bias: Any, axis: int = -1) -> Iterator[Use]:
    """An offset `[d]` along an axis."""
    handle = find(bias)
    if handle is not None and not handle.transposed:
        shape = torch.Size([1] * (output.ndim - 1 - (axis % output.ndim)))
        seen = torch.Size([bias.numel(), *shape])
        yield _use(handle, (1, 1, bias.numel()), output, lambda g, by: _summed(g, by, seen))


def added(find: Lookup, output: Tensor, one: Any, other: Any, alpha: float = 1) -> Iterator[Use]:
    """An offset of any shape that broadcasts."""
    for value, scale in ((one, 1.0), (other, float(alpha))):
        handle = find(value)
        if handle is not None and not handle.transposed:
            yield _use(
                handle, (1, 1, value.numel()), output,
                lambda g, by, s=scale, shape=value.shape: _summed(g * s, by, shape),
            )  # fmt: skip


def subtracted(find: Lookup, output: Tensor, one: Any, other: Any, alpha: float = 1) -> Iterator[Use]:
    """A difference."""
    yield from added(find, output, one, other, -float(alpha))


def multiplied(find: Lookup, output: Tensor, one: Any, other: Any) -> Iterator[Use]:
    """A scale of any shape that broadcasts."""
    for value, partner in ((one, other), (other, one)):
        handle = find(value)
        if handle is not None and not handle.transposed:
            factor = partner.detach() if isinstance(partner, Tensor) else partner
            yield _use(
                handle, (1, 1, value.numel()), output,
                lambda g, by, f=factor, shape=value.shape: _summed(g * f, by, shape),
            )  # fmt: skip


def _normalised(
    find: Lookup, output: Tensor, plain: Callable[[], Tensor], weight: Any, bias: Any, axis: int
) -> Iterator[Use]:
    """Scale and offset after a normalisation, which is done again without them when it is needed."""
    handle = find(weight)
    if handle is not None:
        seen = weight.shape if axis == -1 else torch.Size([weight.numel(), *[1] * (output.ndim - 2)])
        inner = once(plain)
        yield _use(handle, (1, 1, weight.numel()), output, lambda g, by: _summed(g * inner(), by, seen))
    if (handle := find(bias)) is not None:
        seen = bias.shape if axis == -1 else torch.Size([bias.numel(), *[1] * (output.ndim - 2)])
        yield _use(handle, (1, 1, bias.numel()), output, lambda g, by, seen=seen: _summed(g, by, seen))


def layer_norm(
    find: Lookup, output: Tensor, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Iterator[Use]:
    """Layer norm."""
    plain = partial(functional.layer_norm, x.detach(), shape, None, None, eps)
    yield from _normalised(find, output, plain, weight, bias, -1)


def rms_norm(find: Lookup, output: Tensor, x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Iterator[Use]:
    """Root-mean-square norm."""
    yield from _normalised(find, output, partial(functional.rms_norm, x.detach(), shape, None, eps), weight, None, -1)


def group_norm(
    find: Lookup, output: Tensor, x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Iterator[Use]:
    """Group norm."""
    plain = partial(functional.group_norm, x.detach(), groups, None, None, eps)
    yield from _normalised(find, output, plain, weight, bias, 1)


def batch_norm(
    find: Lookup, output: Tensor, x: Tensor, mean: Any, variance: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,  # noqa: FBT001, FBT002, ARG001
) -> Iterator[Use]:  # fmt: skip
    """Batch norm with its running statistics."""
    if not training:
        plain = partial(functional.batch_norm, x.detach(), mean, variance, None, None, training=False, eps=eps)
        yield from _normalised(find, output, plain, weight, bias, 1)


def instance_norm(
    find: Lookup, output: Tensor, x: Tensor, mean: Any = None, variance: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,  # noqa: FBT001, FBT002, ARG001
) -> Iterator[Use]:  # fmt: skip
    """Instance norm."""
    plain = partial(
        functional.instance_norm, x.detach(), mean, variance, None, None, use_input_stats=use_input_stats, eps=eps
    )
    yield from _normalised(find, output, plain, weight, bias, 1)


Rule = Callable[..., Iterator[Use]]

RULES: dict[Any, Rule] = {
    functional.linear: linear,
    torch.addmm: addmm,
    torch.matmul: product,
    torch.mm: product,
    Tensor.matmul: product,
    Tensor.mm: product,
    Tensor.__matmul__: product,
    functional.embedding: embedding,
    functional.conv1d: convolution,
    functional.conv2d: convolution,
    functional.conv3d: convolution,
    functional.conv_transpose1d: transposed_convolution,
    functional.conv_transpose2d: transposed_convolution,
    functional.conv_transpose3d: transposed_convolution,
    functional.layer_norm: layer_norm,
    functional.rms_norm: rms_norm,
    functional.group_norm: group_norm,
    functional.batch_norm: batch_norm,
    functional.instance_norm: instance_norm,
    torch.add: added,
    Tensor.add: added,
    Tensor.__add__: added,
    Tensor.__radd__: added,
    torch.sub: subtracted,
    Tensor.sub: subtracted,
    Tensor.__sub__: subtracted,
    torch.mul: multiplied,
    Tensor.mul: multiplied,
    Tensor.__mul__: multiplied,
    Tensor.__rmul__: multiplied,
}

TRANSPOSES: tuple[Any, ...] = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t)  # type: ignore[attr-defined]
