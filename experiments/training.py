"""Trained networks: the paper's recipes, and a cache of what they gave.

``trained("cnn", "small", n_train=10_000, epochs=30)`` returns the network from the cache, or trains it. The
cache is ``experiments/cache``; a file is named after the settings it depends on.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LRScheduler, MultiStepLR

from experiments import batching, datasets
from experiments.architectures import build, uci_mlp, uci_mlp_layernorm
from experiments.datasets import Examples

CACHE = Path(__file__).parent / "cache"
BATCH = 256  # not in the paper; of its authors' public code


class Scores(NamedTuple):
    """Of a plain classifier: share of correct answers, mean negative log likelihood in nats."""

    accuracy: float
    nll: float


# ---- recipes of the paper --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How a classifier is trained: its data, optimiser, learning rate schedule and batches of an epoch."""

    load: Callable[..., Examples]
    optimiser: Callable[[Iterable[nn.Parameter]], Optimizer]
    schedule: Callable[[Optimizer, int], LRScheduler]
    batches: Callable[[Examples, int, torch.Generator], Iterator[batching.Chunks]]


def two_drops(optimiser: Optimizer, epochs: int) -> LRScheduler:
    """A tenth after 40 and after 70 of 90 epochs, and in proportion for another number."""
    return MultiStepLR(optimiser, [round(epochs * 40 / 90), round(epochs * 70 / 90)], gamma=0.1)


def constant(optimiser: Optimizer, epochs: int) -> LRScheduler:
    """One learning rate throughout."""
    return ConstantLR(optimiser, factor=1.0, total_iters=epochs)


def one_percent_less(optimiser: Optimizer, epochs: int) -> LRScheduler:  # noqa: ARG001
    """One percent less after every epoch, however many there are."""
    return ExponentialLR(optimiser, gamma=0.99)


IMAGE = Recipe(datasets.mnist, partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-4), two_drops, batching.cropped)
# the paper names weight decay for SGD only, so Adam has none
FIXUP = Recipe(datasets.mnist, partial(Adam, lr=1e-2), constant, batching.cropped)
POINT_CLOUD = Recipe(datasets.point_cloud_mnist, partial(Adam, lr=3e-3), one_percent_less, batching.bucketed)

RECIPES: Mapping[str, Recipe] = {
    "cnn": IMAGE,
    "resnet": IMAGE,
    "biased_resnet": IMAGE,
    "pre_resnet": IMAGE,
    "fixup_resnet": FIXUP,
    "transformer": POINT_CLOUD,
}


# ---- classifiers -----------------------------------------------------------------------------------------


def trained(
    arch: str,
    size: str,
    *,
    n_train: int = 60_000,
    epochs: int = 90,
    seed: int = 0,
    data: datasets.Folder = None,
) -> nn.Module:
    """A classifier of the paper in eval mode, trained on the first ``n_train`` images unless it is cached."""
    with _seeded(seed):
        net = build(arch, size)
    path = cached(arch, size, n_train=n_train, epochs=epochs, seed=seed)
    if not path.exists():
        recipe = RECIPES[arch]
        train, test = recipe.load("train", n=n_train, data=data), recipe.load("test", data=data)
        start = time.perf_counter()
        train_classifier(net, train, recipe, epochs=epochs, seed=seed)
        seconds = time.perf_counter() - start
        scores = {part: evaluate(net, of)._asdict() for part, of in (("train", train), ("test", test))}
        _save(net, path, scores | {"seconds": seconds})
    net.load_state_dict(load_file(path))
    return net.eval()


def cached(arch: str, size: str, *, n_train: int = 60_000, epochs: int = 90, seed: int = 0) -> Path:
    """Where :func:`trained` keeps the network of these settings."""
    return CACHE / f"{arch}-{size}-n{n_train}-e{epochs}-s{seed}.safetensors"


def results(path: Path) -> dict:
    """What was measured when the network of ``path`` was trained: scores and seconds."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["results"])


def train_classifier(net: nn.Module, train: Examples, recipe: Recipe, *, epochs: int, seed: int) -> None:
    """Minimise the mean cross entropy, in place."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = recipe.optimiser(net.parameters())
    schedule = recipe.schedule(optimiser, epochs)
    net.train()
    for epoch in range(1, epochs + 1):
        total = 0.0
        for chunks in recipe.batches(train, BATCH, generator):
            optimiser.zero_grad()
            n = sum(len(y) for _, y in chunks)
            for x, y in chunks:
                loss = cross_entropy(net(x), y, reduction="sum")
                (loss / n).backward()
                total += loss.item()
            optimiser.step()
        schedule.step()
        _progress(f"epoch {epoch}/{epochs}  loss {total / len(train.y):.4f}", last=epoch == epochs)
    net.eval()


@torch.no_grad()
def evaluate(net: nn.Module, examples: Examples, batch: int = 200) -> Scores:
    """Accuracy and negative log likelihood of the plain network."""
    net.eval()
    correct, nll = 0, 0.0
    for x, y in batching.in_order(examples, batch):
        logits = net(x).double()
        correct += int((logits.argmax(1) == y).sum())
        nll += float(cross_entropy(logits, y, reduction="sum"))
    return Scores(correct / len(examples.y), nll / len(examples.y))


# ---- regression ------------------------------------------------------------------------------------------

REGRESSORS = {"mlp": uci_mlp, "mlp_layernorm": uci_mlp_layernorm}


def trained_uci(
    name: str,
    arch: Literal["mlp", "mlp_layernorm"] = "mlp",
    *,
    split: Literal["standard", "gap"] = "standard",
    index: int = 0,
    n_train: int | None = None,
    seed: int = 0,
    data: datasets.Folder = None,
) -> nn.Module:
    """A d-50-50-1 network in eval mode, early-stopped on the rows that ``datasets.uci`` gives."""
    rows = "all" if n_train is None else n_train
    path = CACHE / f"uci-{name}-{split}{index}-{arch}-n{rows}-s{seed}.safetensors"
    if not path.exists():
        sets = datasets.uci(name, split, index, n_train=n_train, data=data)
        with _seeded(seed):
            net = REGRESSORS[arch](sets.train.x.shape[1])
        early_stopped(net, sets.train, seed=seed)
        with torch.no_grad():
            rmse = mse_loss(net(sets.test.x), sets.test.y).sqrt().item()
        _save(net, path, {"test": {"rmse": rmse * sets.y_sd.item(), "rmse_normalised": rmse}})
    weights = load_file(path)
    net = REGRESSORS[arch](weights["linear1.weight"].shape[1])
    net.load_state_dict(weights)
    return net.eval()


def validation_rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on and a random sixth to validate on."""
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return shuffled[n // 6 :], shuffled[: n // 6]


def early_stopped(
    net: nn.Module,
    examples: Examples,
    *,
    seed: int,
    lr: float = 1e-2,
    batch: int = 128,
    patience: int = 1000,
    steps: int = 20_000,
) -> None:
    """Minimise the squared error by Adam, in place; keep the weights that are best on a sixth of the rows.

    Validation is after every epoch; training ends once ``patience`` steps have not improved it.
    """
    x, y = examples.x, examples.y
    train, held_out = validation_rows(len(y), seed)
    generator = torch.Generator().manual_seed(seed)
    optimiser = Adam(net.parameters(), lr=lr)
    best, best_step, best_weights, step = float("inf"), 0, copy.deepcopy(net.state_dict()), 0
    while step < min(steps, best_step + patience):
        net.train()
        for inputs, targets in batching.shuffled(Examples(x[train], y[train]), batch, generator):
            optimiser.zero_grad()
            mse_loss(net(inputs), targets).backward()
            optimiser.step()
            step += 1
        net.eval()
        with torch.no_grad():
            loss = mse_loss(net(x[held_out]), y[held_out]).item()
        if loss < best:
            best, best_step, best_weights = loss, step, copy.deepcopy(net.state_dict())
        _progress(f"step {step}  validation {loss:.4f}  best {best:.4f}")
    _progress("", last=True)
    net.load_state_dict(best_weights)
    net.eval()


# ---- helpers ---------------------------------------------------------------------------------------------


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Initial values that depend on the seed alone; the caller's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _save(net: nn.Module, path: Path, measured: dict) -> None:
    """Write at once or not at all, so that two runs do not disturb one another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    weights = {name: value.contiguous() for name, value in net.state_dict().items()}
    save_file(weights, draft, metadata={"results": json.dumps(measured)})
    draft.replace(path)


def _progress(message: str, *, last: bool = False) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="\n" if last else "", file=sys.stderr, flush=True)
