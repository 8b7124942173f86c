"""The data sets of the experiments, as tensors ready for a network.

The folder is, in this order: the argument (``--data``), the environment variable ``LINLAP_DATA``,
``../shared/data`` beside the repository if it exists, and a cache in the home directory. Image sets that are
not there are downloaded by torchvision, where it is installed; UCI and toy sets have to be there.
"""

import gzip
import lzma
import os
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Part = Literal["train", "test"]
Folder = str | os.PathLike[str] | None
Channels = float | tuple[float, float, float]

MNIST_MEAN, MNIST_SD = 0.1307, 0.3081
CIFAR_MEAN, CIFAR_SD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
LONGEST_CLOUD = 351  # the most lit pixels of an MNIST image


class Examples(NamedTuple):
    """Inputs and targets, first axis the examples."""

    x: Any  # a tensor; for point clouds the tuple (points, mask)
    y: Tensor

    def first(self, n: int | None) -> "Examples":
        """The first ``n`` examples; all of them for None."""
        x = tuple(part[:n] for part in self.x) if isinstance(self.x, tuple) else self.x[:n]
        return Examples(x, self.y[:n])


class Regression(NamedTuple):
    """One split of a regression set, normalised by its training rows: ``y = (file - y_mean) / y_sd``."""

    train: Examples
    test: Examples
    y_mean: Tensor
    y_sd: Tensor


def add_data_argument(parser: ArgumentParser) -> None:
    """Give a command the flag ``--data``."""
    parser.add_argument("--data", metavar="FOLDER", help="data folder (default: $LINLAP_DATA, or a download)")


def data_folder(data: Folder = None) -> Path:
    """The folder with the data sets; it may not exist yet."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    chosen = data or os.environ.get("LINLAP_DATA") or (beside if beside.is_dir() else "~/.cache/linlap/data")
    return Path(chosen).expanduser()


# ---- images ----------------------------------------------------------------------------------------------


def mnist(part: Part, *, n: int | None = None, data: Folder = None) -> Examples:
    """MNIST: ``x [n, 1, 28, 28]`` with mean 0 and standard deviation 1, ``y [n]``."""
    images, labels = _mnist_like("MNIST", part, data)
    return _normalised(images[:n, None], labels[:n], MNIST_MEAN, MNIST_SD)


def kmnist(part: Part, *, n: int | None = None, data: Folder = None) -> Examples:
    """KMNIST, normalised with the constants of MNIST as unfamiliar inputs of its networks are."""
    images, labels = _mnist_like("KMNIST", part, data)
    return _normalised(images[:n, None], labels[:n], MNIST_MEAN, MNIST_SD)


def cifar10(part: Part, *, n: int | None = None, data: Folder = None) -> Examples:
    """CIFAR-10: ``x [n, 3, 32, 32]``, every channel with mean 0 and standard deviation 1, ``y [n]``."""
    root = data_folder(data)
    if (root / "cifar10" / "labels.npz").exists():
        with np.load(root / "cifar10" / "labels.npz") as file:
            labels = file[part]
        files = sorted((root / "cifar10").glob(f"{part}*.xz"))
        images = np.concatenate([_undo_differences(path) for path in files])
    else:
        downloaded = _torchvision("CIFAR-10", root).CIFAR10(root, train=part == "train", download=True)
        images, labels = downloaded.data, np.asarray(downloaded.targets)
    return _normalised(images[:n].transpose(0, 3, 1, 2), labels[:n], CIFAR_MEAN, CIFAR_SD)


def point_cloud_mnist(part: Part, *, n: int | None = None, data: Folder = None) -> Examples:
    """MNIST as sets of lit pixels: ``x = (points [n, 351, 3], mask [n, 351])``."""
    images, labels = _mnist_like("MNIST", part, data)
    return Examples(point_cloud(torch.from_numpy(images[:n])), torch.from_numpy(labels[:n]).long())


def point_cloud_kmnist(part: Part, *, n: int | None = None, data: Folder = None) -> Examples:
    """KMNIST as sets of lit pixels; its characters are larger, so there are up to 620 points."""
    images, labels = _mnist_like("KMNIST", part, data)
    return Examples(point_cloud(torch.from_numpy(images[:n])), torch.from_numpy(labels[:n]).long())


def point_cloud(images: Tensor) -> tuple[Tensor, Tensor]:
    """Lit pixels of images ``[n, h, w]`` (uint8): ``points [n, t, 3]`` and ``mask [n, t]``, t at least 351.

    A point is (x, y, intensity): coordinates in [-1, 1], intensity in (0, 1]; padding is zero, mask False.
    """
    n, height, width = images.shape
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    values = images.reshape(n, -1).float() / 255
    lit = values > 0
    longest = max(LONGEST_CLOUD, int(lit.sum(1).max()))
    pixels = lit.logical_not().byte().argsort(dim=1, stable=True)[:, :longest]  # the lit pixels come first
    mask = lit.gather(1, pixels)
    x, y = columns.flatten()[pixels], rows.flatten()[pixels]
    points = torch.stack([x, y, values.gather(1, pixels)], dim=-1)
    return points * mask[..., None], mask


def _normalised(images: np.ndarray, labels: np.ndarray, mean: Channels, sd: Channels) -> Examples:
    x = torch.from_numpy(np.ascontiguousarray(images)).float().div_(255)
    x.sub_(torch.tensor(mean).reshape(-1, 1, 1)).div_(torch.tensor(sd).reshape(-1, 1, 1))
    return Examples(x, torch.from_numpy(labels.astype(np.int64)))


def _mnist_like(name: str, part: Part, data: Folder) -> tuple[np.ndarray, np.ndarray]:
    """Images ``[n, 28, 28]`` and labels ``[n]``, both uint8, from the original idx files."""
    root = data_folder(data)
    raw = root / name / "raw"
    stem = {"train": "train", "test": "t10k"}[part]
    images, labels = (raw / f"{stem}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    excerpt = root / name / "train_first7000.npz"
    if part == "train" and excerpt.exists() and not images.exists():
        with np.load(excerpt) as file:
            return file["images"], file["labels"]
    if not (images.exists() and labels.exists()):
        getattr(_torchvision(name, root), name)(root, download=True)
    return _idx(images, offset=16).reshape(-1, 28, 28), _idx(labels, offset=8)


def _idx(path: Path, offset: int) -> np.ndarray:
    return np.frombuffer(bytearray(gzip.decompress(path.read_bytes())), np.uint8, offset=offset)


def _undo_differences(path: Path) -> np.ndarray:
    """Images ``[n, 32, 32, 3]`` from the differences of the planes G, R - G, B - G, all modulo 256."""
    with lzma.open(path) as file:
        planes = np.load(file).cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    return np.stack([planes[1] + planes[0], planes[0], planes[2] + planes[0]], -1)


def _torchvision(name: str, root: Path) -> ModuleType:
    try:
        from torchvision import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        remedy = "name a folder that has it with --data or LINLAP_DATA, or install torchvision to download it"
        raise FileNotFoundError(f"{name} is not in {root}: {remedy}.") from error
    return datasets


# ---- regression ------------------------------------------------------------------------------------------


def uci(
    name: str,
    split: Literal["standard", "gap"] = "standard",
    index: int = 0,
    *,
    n_train: int | None = None,
    data: Folder = None,
    dtype: torch.dtype = torch.float32,
) -> Regression:
    """A UCI set (concrete, kin8nm, naval, protein, yacht), with ``n_train`` of its training rows or all."""
    with _arrays(data_folder(data) / "uci" / name / f"{name}.npz") as file:
        table = torch.from_numpy(file["data"])
        columns = [torch.from_numpy(file[key].astype(np.int64)) for key in ("feature_idx", "target_idx")]
        rows = [file[f"{split}_{part}"][index] for part in ("train", "test")]
    train, test = (torch.from_numpy(of.astype(np.int64)) for of in rows)
    if n_train is not None:
        # in random order, since the rows of a gap split are sorted by a feature
        train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(index))[:n_train]]
    (x_mean, x_sd), (y_mean, y_sd) = (_mean_and_sd(table[train][:, of]) for of in columns)
    x, y = (table[:, columns[0]] - x_mean) / x_sd, (table[:, columns[1]] - y_mean) / y_sd
    x, y = x.to(dtype), y.to(dtype)
    return Regression(Examples(x[train], y[train]), Examples(x[test], y[test]), y_mean, y_sd)


def toy(
    name: str,
    part: Part = "train",
    *,
    data: Folder = None,
    dtype: torch.dtype = torch.float32,
) -> Examples:
    """``x [n, d]``, ``y [n, 1]`` of my_1d (train, test), matern_1d, wiggle, gap_axis, gap_origin (train)."""
    with _arrays(data_folder(data) / "toy" / f"{name}.npz") as file:
        suffix = f"_{part}" if "x_train" in file else ""
        x, y = (torch.from_numpy(file[axis + suffix]).to(dtype) for axis in ("x", "y"))
    if part == "test" and not suffix:
        raise ValueError(f"{name} has no test part.")
    return Examples(x, y)


def _arrays(path: Path) -> "np.lib.npyio.NpzFile":
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name the data folder with --data or LINLAP_DATA.")
    return np.load(path, allow_pickle=False)


def _mean_and_sd(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of every column; a constant column (naval has two) is divided by one."""
    mean, sd = rows.mean(0), rows.std(0, correction=0)
    return mean, sd.where(sd > 1e-10 * mean.abs().clamp(min=1), torch.ones_like(sd))
