"""Several networks of one architecture, trained side by side: one batched step for all of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.optim import Adam

from experiments.datasets import Examples
from experiments.training import validation_rows

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """Adam on the squared error; it ends after `patience` steps without a better validation error of any member."""

    lr: float = 1e-2
    batch: int = 32
    patience: int = 2000
    steps: int = 12_000


def early_stopped(build: Callable[[], nn.Module], examples: Examples, seeds: range, recipe: Recipe) -> Weights:
    """The weights `[members, ...]` of each member that are best on its own sixth of the rows.

    A member's seed determines its initial weights, its validation rows and its batches.
    """
    members = [seeded(build, seed) for seed in seeds]
    rows = [validation_rows(len(examples.y), seed) for seed in seeds]
    x, y = (torch.stack([of[train] for train, _ in rows]) for of in examples)  # [members, n, ...]
    x_held, y_held = (torch.stack([of[held] for _, held in rows]) for of in examples)
    weights = {k: v.detach().clone().requires_grad_() for k, v in stack_module_state(members)[0].items()}
    output = vmap(lambda of, inputs: functional_call(members[0], of, (inputs,)))
    optimiser = Adam(weights.values(), lr=recipe.lr)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    every = torch.arange(len(seeds)).unsqueeze(1)
    best = torch.full((len(seeds),), float("inf"), dtype=y.dtype)
    kept, step, last = {k: v.detach().clone() for k, v in weights.items()}, 0, 0
    while step < min(recipe.steps, last + recipe.patience):
        order = torch.stack([torch.randperm(x.shape[1], generator=g) for g in generators])
        for chosen in order.split(recipe.batch, dim=1):
            optimiser.zero_grad()
            # a sum over the members, so that each has the gradient it would have alone
            (output(weights, x[every, chosen]) - y[every, chosen]).square().mean((1, 2)).sum().backward()
            optimiser.step()
            step += 1
        with torch.no_grad():
            error = (output(weights, x_held) - y_held).square().mean((1, 2))
        better = error < best
        if bool(better.any()):
            best, last = torch.where(better, error, best), step
            for name, value in weights.items():
                kept[name][better] = value.detach()[better]
    return kept


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network whose initial weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def member(build: Callable[[], nn.Module], weights: Weights, number: int) -> nn.Module:
    """One of the networks, in eval mode."""
    net = build()
    net.load_state_dict({name: value[number] for name, value in weights.items()})
    return net.eval()
