"""The main job end to end, on data that come with scikit-learn: `linlap demo`.

Three networks are trained, each gets a posterior by `ll.fit` without options, and the plain network is scored beside
it: a batch-norm convolutional network on pictures of digits, a perceptron on the progress of diabetes, and one on a
curve with a gap in its data. Everything random has a fixed seed.
"""

import textwrap
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linlap import figures
from linlap.calibration import calibrate
from linlap.errors import EvidenceWarning, MissingExtraError
from linlap.fit import fit
from linlap.metrics import Evaluation, evaluate
from linlap.posterior import Posterior
from linlap.state import random_state_kept

Pair = tuple[Tensor, Tensor]
SEED = 0


@dataclass(frozen=True)
class Digits:
    """A classifier's posterior, the same one calibrated on held-out digits, and what they are judged on."""

    posterior: Posterior
    calibrated: Posterior
    test: Pair
    inverted: Tensor


@dataclass(frozen=True)
class Curve:
    """A posterior of a regression, its training and its test data."""

    posterior: Posterior
    training: Pair
    test: Pair


def run(folder: str | Path) -> None:
    """Train, fit, compare, print, and write the figures into a folder."""
    begun = time.perf_counter()
    needed("matplotlib.figure")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvidenceWarning)  # it is printed, among the notes
        digits, diabetes, gap = classes(), numbers(), curve()
    _title("Digits: 200 pictures of 8 × 8, a convolutional network with batch norm")
    _show(digits.posterior)
    print("\nTest digits; nll, ece and brier: lower is better; auroc: are inverted digits told apart, 0.5 by chance?\n")
    _show(side_by_side(digits))
    _title("Diabetes: 300 patients, ten measurements, a perceptron trained without early stopping")
    _show(diabetes.posterior)
    print("\nTest patients; coverage: the share inside the intervals; sharpness: the mean standard deviation\n")
    _show(plain_first(evaluate(diabetes.posterior, diabetes.test)))
    _title("A curve with a gap in its data")
    for x, prediction in zip((-2.0, 0.0), at(gap.posterior, (-2.0, 0.0)), strict=True):
        print(f"  x = {x:4.1f}   {prediction}")
    written = draw(digits, diabetes, gap, Path(folder))
    print(f"\nFigures: {', '.join(map(str, written))}   ({time.perf_counter() - begun:.0f} s in all)")


def _show(value: Posterior | Evaluation) -> None:
    """Print it, long notes and warnings wrapped."""
    for line in str(value).splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        long = textwrap.fill(line.strip(), 110, initial_indent=indent, subsequent_indent=indent + "    ")
        print(long if len(line) > 110 else line)


def _title(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}")


def classes(training: int = 200, held_out: int = 200, test: int = 597, epochs: int = 100) -> Digits:
    """Digits for training, for calibration and for the test, and the test's inverted."""
    found = needed("sklearn.datasets").load_digits()
    x = torch.tensor(found.images / 16, dtype=torch.float32).unsqueeze(1)
    x, y = shuffled(x, torch.tensor(found.target))
    ends = (training, training + held_out, training + held_out + test)
    known, unseen, judged = ((x[a:b], y[a:b]) for a, b in zip((0, *ends), ends, strict=False))
    with random_state_kept():
        torch.manual_seed(SEED)
        net = trained(_convolutional(), known, nn.functional.cross_entropy, epochs, rate=0.1)
    post = fit(net, known, "classification")
    return Digits(post, calibrate(post, unseen), judged, 1 - judged[0])


def numbers(training: int = 300, epochs: int = 100) -> Curve:
    """Diabetes: progress of the disease after a year, in units of the training patients' standard deviation."""
    found = needed("sklearn.datasets").load_diabetes()
    x, y = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target, dtype=torch.float32).unsqueeze(1)
    x, y = shuffled(x, y)
    x, y = ((t - t[:training].mean(0)) / t[:training].std(0) for t in (x, y))
    known, test = (x[:training], y[:training]), (x[training:], y[training:])
    return _regression(known, test, nn.ReLU, epochs)


def curve(examples: int = 120, epochs: int = 300) -> Curve:
    """A sine with noise, known left and right of a gap."""
    generator = torch.Generator().manual_seed(SEED)
    half = torch.rand(examples // 2, 2, generator=generator) * 2
    x = torch.cat([half[:, :1] - 3, half[:, 1:] + 1])
    y = torch.sin(1.5 * x) + 0.15 * torch.randn(x.shape, generator=generator)
    line = torch.linspace(-4.5, 4.5, 361).unsqueeze(1)
    return _regression((x, y), (line, torch.sin(1.5 * line)), nn.Tanh, epochs)


def _regression(known: Pair, test: Pair, activation: Callable[[], nn.Module], epochs: int) -> Curve:
    with random_state_kept():
        torch.manual_seed(SEED)
        net = nn.Sequential(
            nn.Linear(known[0].shape[1], 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 1)
        )
        trained(net, known, nn.functional.mse_loss, epochs, rate=0.02)
    return Curve(fit(net, known, "regression"), known, test)


def _convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10)),
    )


def trained(net: nn.Module, data: Pair, loss: Callable[..., Tensor], epochs: int, rate: float) -> nn.Module:
    """The network after ordinary training: momentum, weight decay, a rate that falls to zero."""
    x, y = data
    optimiser = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            loss(net(x[rows]), y[rows]).backward()
            optimiser.step()
        schedule.step()
    return net.eval()


def shuffled(x: Tensor, y: Tensor) -> Pair:
    """Examples in an order of no meaning."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    return x[order], y[order]


def side_by_side(digits: Digits) -> Evaluation:
    """The plain network, the posterior, and the posterior calibrated on held-out digits."""
    found = evaluate(digits.posterior, digits.test, unfamiliar=digits.inverted)
    calibrated = evaluate(digits.calibrated, digits.test, unfamiliar=digits.inverted)
    return plain_first(found, {"posterior, held_out=": calibrated.posterior})


def plain_first(found: Evaluation, more: Mapping[str, dict[str, float]] | None = None) -> Evaluation:
    """The same scores with the plain network's on top, and more below."""
    ordered = {name: found.scores[name] for name in ("network", "posterior", "posterior, linear mean")}
    return replace(found, scores={**ordered, **(more or {})})


def at(post: Posterior, places: tuple[float, ...]) -> list[str]:
    """What the posterior says there, in words."""
    predicted = post.predict(torch.tensor(places).unsqueeze(1))
    low, high = predicted.interval(0.9)
    noise = 0.0 if predicted.noise_std is None else float(predicted.noise_std)
    return [
        f"{mean:5.2f}, 90 % between {a:5.2f} and {b:5.2f}; epistemic sd {std:.2f}, noise {noise:.2f}"
        for mean, a, b, std in zip(
            *(t.flatten().tolist() for t in (predicted.mean, low, high, predicted.epistemic_std)), strict=True
        )
    ]


def draw(digits: Digits, diabetes: Curve, gap: Curve, folder: Path) -> list[Path]:
    """All figures, by the panels they are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = figures.Seen.of(digits.posterior, digits.calibrated, digits.test, digits.inverted)
    pages: dict[str, Callable[[Any], None]] = {
        "digits": lambda page: figures.digits(page, seen),
        "diabetes": lambda page: figures.coverage(page.subplots(), diabetes.posterior, diabetes.test),
        "gap": lambda page: figures.gap(page.subplots(), gap.posterior, gap.training, gap.test),
    }
    sizes = {"digits": (9.0, 6.6), "diabetes": (4.6, 4.2), "gap": (6.4, 3.6)}
    make = needed("matplotlib.figure").Figure
    written = []
    for name, panel in pages.items():
        page = make(figsize=sizes[name], layout="constrained", dpi=130)
        panel(page)
        written.append(folder / f"{name}.png")
        page.savefig(written[-1])
    whole = make(figsize=(9.0, 10.4), layout="constrained", dpi=100)
    top, bottom = whole.subfigures(2, 1, height_ratios=(3.6, 6.6))
    left, right = top.subfigures(1, 2, width_ratios=(5.2, 3.8))
    for page, name in ((left, "gap"), (right, "diabetes"), (bottom, "digits")):
        pages[name](page)
    whole.savefig(folder / "demo.png", pil_kwargs={"optimize": True})
    return [*written, folder / "demo.png"]


def needed(module: str) -> Any:
    """A module of the extra "demo"."""
    try:
        return import_module(module)
    except ImportError as missing:
        raise MissingExtraError(
            f'the demo needs the extra "demo", but {module.partition(".")[0]} is not installed: '
            'pip install "linlap[demo]"'
        ) from missing
