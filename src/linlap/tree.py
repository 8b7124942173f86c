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
    if isinstance(tree, tuple | list):
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
    """All tensors with their paths: `#0` is a place in a tuple, `key` a key of a mapping, the root has no path."""
    if isinstance(tree, Tensor):
        return [("", tree)]
    if isinstance(tree, Mapping):
        children = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, tuple | list):
        children = [(f"#{i}", value) for i, value in enumerate(tree)]
    else:
        return []
    return [(f"{name}/{path}", leaf) for name, child in children for path, leaf in named_leaves(child)]


def from_named_leaves(named: Mapping[str, Tensor]) -> Any:
    """The tree of tensors with these paths."""
    if "" in named:
        return named[""]
    children: dict[str, dict[str, Tensor]] = {}
    for path, leaf in named.items():
        name, _, rest = path.partition("/")
        children.setdefault(name, {})[rest] = leaf
    if all(name.startswith("#") for name in children):
        return tuple(from_named_leaves(children[f"#{i}"]) for i in range(len(children)))
    return {name: from_named_leaves(child) for name, child in children.items()}
