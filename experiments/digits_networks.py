"""The networks of the digits experiment and their images."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from experiments import batching, datasets
from experiments.architectures import build
from experiments.batching import Chunks
from experiments.datasets import Examples
from experiments.ensembles import seeded
from experiments.training import CACHE, RECIPES, train_classifier, trained

EPOCHS = {"cnn": 30, "resnet": 30, "fixup_resnet": 30, "pre_resnet": 30, "transformer": 100}
UNCROPPED = "-uncropped"
"""Added to the name of an architecture whose training images were not cropped at random: it memorises them."""

NETS = (*EPOCHS, *(arch + UNCROPPED for arch in ("cnn", "resnet")))
SIZE = "tiny"
TRAINING_IMAGES, HELD_OUT_IMAGES, TEST_IMAGES = 4000, 500, 2000


@dataclass(frozen=True)
class Which:
    """One network."""

    name: str
    seed: int

    @property
    def title(self) -> str:
        """What files are named after."""
        return f"{self.name}-s{self.seed}"

    @property
    def arch(self) -> str:
        """Its architecture."""
        return self.name.removesuffix(UNCROPPED)


def network(which: Which, data: datasets.Folder) -> nn.Module:
    """Trained unless it is in the cache."""
    return (uncropped if which.name.endswith(UNCROPPED) else cropped)(which, data)


def cropped(which: Which, data: datasets.Folder) -> nn.Module:
    """Trained by its recipe."""
    return trained(which.arch, SIZE, n_train=TRAINING_IMAGES, epochs=EPOCHS[which.arch], seed=which.seed, data=data)


def uncropped(which: Which, data: datasets.Folder) -> nn.Module:
    """Trained by its recipe, but for the crops."""
    net = seeded(partial(build, which.arch, SIZE), which.seed)
    path = CACHE / f"{which.arch}-{SIZE}-n{TRAINING_IMAGES}-e{EPOCHS[which.arch]}-s{which.seed}-uncropped.safetensors"
    if not path.exists():
        recipe = replace(RECIPES[which.arch], batches=whole)
        images = recipe.load("train", n=TRAINING_IMAGES, data=data)
        train_classifier(net, images, recipe, epochs=EPOCHS[which.arch], seed=which.seed)
        draft = path.with_suffix(".draft")
        save_file({name: value.contiguous() for name, value in net.state_dict().items()}, draft)
        draft.replace(path)
    net.load_state_dict(load_file(path))
    return net.eval()


def whole(examples: Examples, size: int, generator: torch.Generator) -> Iterator[Chunks]:
    """Every example once, in random order, as it is."""
    for batch in batching.shuffled(examples, size, generator):
        yield [batch]


def images(which: Which, data: datasets.Folder) -> list[Examples]:
    """To train on, held out, to test on, and unfamiliar."""
    load = RECIPES[which.arch].load
    load_unfamiliar = {datasets.mnist: datasets.kmnist, datasets.point_cloud_mnist: datasets.point_cloud_kmnist}[load]
    first = load("train", n=TRAINING_IMAGES + HELD_OUT_IMAGES, data=data)
    return [
        first.first(TRAINING_IMAGES),
        chosen(first, slice(TRAINING_IMAGES, None)),
        spread(load("test", data=data)),
        spread(load_unfamiliar("test", data=data)),
    ]


def chosen(examples: Examples, rows: slice) -> Examples:
    """Some of the rows."""
    x = tuple(part[rows] for part in examples.x) if isinstance(examples.x, tuple) else examples.x[rows]
    return Examples(x, examples.y[rows])


def spread(test: Examples) -> Examples:
    """Evenly over the file, whose second half is harder."""
    return chosen(test, slice(None, None, len(test.y) // TEST_IMAGES))
