"""Batches of examples: in order, in random order, randomly cropped, or of point clouds of about one length.

A batch may be a list of chunks that pass through the network one after another.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.datasets import Examples

Chunk = tuple[Any, Tensor]  # inputs, targets
Chunks = list[Chunk]

CROP_PADDING = 2
CLOUDS = 16  # in a chunk: the attention matrices of more of them leave the processor's cache


def in_order(examples: Examples, size: int) -> Iterator[Chunk]:
    """Every example once; point clouds sorted by length and trimmed."""
    if isinstance(examples.x, tuple):
        by_length = examples.x[1].sum(1).argsort(stable=True)
        yield from _trimmed(examples, by_length.split(min(size, CLOUDS)))
    else:
        yield from zip(examples.x.split(size), examples.y.split(size), strict=True)


def shuffled(examples: Examples, size: int, generator: torch.Generator) -> Iterator[Chunk]:
    """Every example once, in random order."""
    for rows in torch.randperm(len(examples.y), generator=generator).split(size):
        yield examples.x[rows], examples.y[rows]


def cropped(examples: Examples, size: int, generator: torch.Generator) -> Iterator[Chunks]:
    """Every image once, in random order, moved by up to two pixels a side."""
    for x, y in shuffled(examples, size, generator):
        yield [(random_crop(x, generator), y)]


def bucketed(examples: Examples, size: int, generator: torch.Generator) -> Iterator[Chunks]:
    """Every point cloud once; a batch is made of random chunks, a chunk of clouds of about one length.

    Sorting is of lengths with noise, so that chunks differ from epoch to epoch.
    """
    lengths = examples.x[1].sum(1)
    chunks = (lengths + 10 * torch.randn(len(lengths), generator=generator)).argsort().split(CLOUDS)
    order = torch.randperm(len(chunks), generator=generator)
    for batch in order.split(size // CLOUDS):
        yield list(_trimmed(examples, [chunks[i] for i in batch]))


def random_crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pad ``[b, c, h, w]`` with the darkest value, cut back to ``h x w`` at a random place for each image."""
    batch, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, [CROP_PADDING] * 4, value=float(images.min()))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [b, c, places, places, h, w], a view
    top, left = torch.randint(2 * CROP_PADDING + 1, (2, batch), generator=generator)
    return windows[torch.arange(batch), :, top, left]


def _trimmed(examples: Examples, chunks: Iterable[Tensor]) -> Iterator[Chunk]:
    """Chunks (of row numbers) without the padding that all their clouds share."""
    points, mask = examples.x
    for rows in chunks:
        longest = int(mask[rows].sum(1).max())
        yield (points[rows, :longest], mask[rows, :longest]), examples.y[rows]
