"""Tensors nested in tuples, lists and mappings: the forms in which networks take their inputs."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def leaves(tree: Any) -> list[Tensor]:
    """All tensors of a nested structure, in a fixed order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, tuple | list):
        return [leaf for value in tree for leaf in leaves(value)]
    return []


def map_leaves(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same structure with `function` applied to every tensor; mappings become plain dicts."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_leaves(function, value) for value in tree]
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, value) for value in tree)
    return tree


def rebuild(tree: Any, tensors: list[Tensor]) -> Any:
    """The same structure with its tensors replaced by `tensors`, in the order of `leaves`."""
    supply = iter(tensors)
    return map_leaves(lambda _: next(supply), tree)


def count(tree: Any) -> int:
    """The number of examples: the length of the first axis of the first tensor."""
    return len(leaves(tree)[0])


def named_leaves(tree: Any) -> list[tuple[str, Tensor]]:
    """All tensors with their paths, those of `named_values`."""
    return [(path, value) for path, value in named_values(tree) if isinstance(value, Tensor)]


def named_values(tree: Any) -> list[tuple[str, Any]]:
    """Everything with its path: `#0` is a place in a tuple, `@0` in a list, `key` a key of a mapping, the root has none."""
    if isinstance(tree, Mapping):
        children = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, tuple | list):
        mark = "@" if isinstance(tree, list) else "#"
        children = [(f"{mark}{i}", value) for i, value in enumerate(tree)]
    else:
        return [("", tree)]
    return [(f"{name}/{path}", value) for name, child in children for path, value in named_values(child)]


def from_named_values(named: Mapping[str, Any]) -> Any:
    """The tree with these values at these paths."""
    if "" in named:
        return named[""]
    children: dict[str, dict[str, Any]] = {}
    for path, value in named.items():
        name, _, rest = path.partition("/")
        children.setdefault(name, {})[rest] = value
    for mark, kind in (("#", tuple), ("@", list)):
        if all(name.startswith(mark) for name in children):
            return kind(from_named_values(children[f"{mark}{i}"]) for i in range(len(children)))
    return {name: from_named_values(child) for name, child in children.items()}
