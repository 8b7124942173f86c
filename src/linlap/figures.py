"""Panels of figures. Each draws on the axes or the page it is given, so that any of them can be combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linlap.posterior import Posterior
from linlap.predictive import Predictive

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    Page = Figure | SubFigure

NETWORK, POSTERIOR, HELD_OUT, UNFAMILIAR, FAINT = "#8a8f98", "#1f5fbf", "#0a9396", "#d9660b", "#d7dae0"
PICTURES = 8


@dataclass(frozen=True)
class Seen:
    """What a classifier says of familiar pictures `[n, 1, h, w]` with labels `[n]`, and of unfamiliar ones."""

    pictures: Tensor
    labels: Tensor
    strange: Tensor
    familiar: Predictive
    unfamiliar: Predictive
    held_out: Tensor

    @staticmethod
    def of(post: Posterior, calibrated: Posterior, test: tuple[Tensor, Tensor], strange: Tensor) -> Seen:
        """Predict all of it."""
        held_out = calibrated.predict(test[0]).probs()
        return Seen(test[0], test[1], strange, post.predict(test[0]), post.predict(strange), held_out)


def digits(page: Page, seen: Seen) -> None:
    """Are the probabilities right, what is unfamiliar, and the pictures at either end."""
    parts: Any = page.subfigures(2, 1)
    top, bottom = parts
    left, right = top.subplots(1, 2)
    reliability(left, seen)
    scores(right, seen)
    gallery(bottom, seen)


def reliability(axes: Axes, seen: Seen) -> None:
    """The share that is right against the confidence, in eight bins of equally many examples."""
    kinds = (
        ("plain network", seen.familiar.mean.softmax(1), NETWORK, 9),
        ("posterior", seen.familiar.probs(), POSTERIOR, 5),
        ("posterior, held_out=", seen.held_out, HELD_OUT, 4),
    )
    lowest = 1.0
    for name, probabilities, colour, size in kinds:
        confidence, right = binned(probabilities, seen.labels)
        lowest = min([lowest, *confidence, *right])
        axes.plot(confidence, right, marker="o", ms=size, lw=1.4, color=colour, label=name)
    axes.plot([0, 1], [0, 1], color=FAINT, zorder=0)
    low = max(0.0, lowest - 0.04)
    axes.set(xlim=(low, 1.02), ylim=(low, 1.02), xlabel="confidence", ylabel="share that is right")
    axes.set_title("Are the probabilities right?", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _plain(axes)


def binned(probabilities: Tensor, labels: Tensor, bins: int = 8) -> tuple[list[float], list[float]]:
    """Mean confidence and share of right answers in bins of equally many examples."""
    confidence, guess = probabilities.max(1)
    order = confidence.argsort()
    parts = [rows for rows in order.tensor_split(bins) if len(rows)]
    means = [float(confidence[rows].mean()) for rows in parts]
    return means, [float((guess[rows] == labels[rows]).float().mean()) for rows in parts]


def scores(axes: Axes, seen: Seen) -> None:
    """Epistemic scores of familiar and unfamiliar inputs, with the cut at five false alarms in a hundred."""
    known, strange = (p.epistemic_score.double().log10() for p in (seen.familiar, seen.unfamiliar))
    cut = float(torch.quantile(seen.familiar.reference, 0.95).log10())
    edges = torch.linspace(float(min(known.min(), strange.min())), float(max(known.max(), strange.max())), 36).tolist()
    axes.hist(known.tolist(), edges, color=POSTERIOR, alpha=0.75, label="digits")
    axes.hist(strange.tolist(), edges, color=UNFAMILIAR, alpha=0.75, label="inverted digits")
    axes.axvline(cut, color="black", lw=1, ls="--")
    height = axes.get_ylim()[1]
    axes.set_ylim(0, 1.22 * height)
    axes.text(cut, 1.19 * height, "5 % false alarms ", fontsize=8, va="top", ha="right")
    axes.set(xlabel="epistemic score (log₁₀)", ylabel="pictures")
    axes.set_title("Has the network seen such inputs?", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    _plain(axes)


def gallery(page: Page, seen: Seen) -> None:
    """The most and the least certain pictures by the posterior, and unfamiliar ones by the plain network."""
    probabilities = seen.familiar.probs()
    order = probabilities.max(1).values.argsort(descending=True)
    alarmed = seen.unfamiliar.unfamiliar().tolist()
    plain = seen.unfamiliar.mean.softmax(1)
    rows = (
        ("most\ncertain", seen.pictures, order[:PICTURES], probabilities, POSTERIOR),
        ("least\ncertain", seen.pictures, order[-PICTURES:].flip(0), probabilities, POSTERIOR),
        ("inverted;\nthe plain\nnetwork\nsays", seen.strange, torch.arange(PICTURES), plain, UNFAMILIAR),
    )
    page.suptitle("What is said of single pictures?", x=0.06, ha="left", fontsize=10)
    grid = page.subplots(len(rows), PICTURES)
    for axes_of_row, (title, pictures, chosen, says, colour) in zip(grid, rows, strict=True):
        axes_of_row[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9, labelpad=10)
        for axes, i in zip(axes_of_row, chosen.tolist(), strict=False):
            axes.imshow(pictures[i, 0].tolist(), cmap="gray_r", vmin=0, vmax=1)
            text = f"{int(says[i].argmax())}: {float(says[i].max()):.0%}".replace("%", " %")
            if pictures is seen.pictures and int(says[i].argmax()) != int(seen.labels[i]):
                text += f" (is {int(seen.labels[i])})"
            if pictures is seen.strange:
                text += "\nflagged" if alarmed[i] else "\nnot flagged"
            axes.set_title(text, fontsize=8, color=colour, pad=2)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)


def coverage(axes: Axes, post: Posterior, test: tuple[Tensor, Tensor]) -> None:
    """How many targets the central intervals hold, against how many they should."""
    predicted, y = post.predict(test[0]), test[1]
    levels = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    half = 2**0.5 * torch.erfinv(levels)
    distance = (y - predicted.mean).abs().flatten().double()
    plain = post.noises.plain.sqrt() if post.noises is not None else torch.zeros(1)
    chance = 1.96 * (levels * (1 - levels) / len(y)).sqrt()
    axes.fill_between(levels, levels - chance, levels + chance, color=FAINT, alpha=0.6, lw=0, label="95 % by chance")
    axes.plot([0, 1], [0, 1], color="#b0b5bf", lw=1)
    for name, std, colour in (("plain network", plain, NETWORK), ("posterior", predicted.std.flatten(), POSTERIOR)):
        held = [float((distance <= h * std.double()).double().mean()) for h in half]
        axes.plot(levels, held, color=colour, lw=1.8, label=name)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="level of the interval", ylabel="share of test patients inside")
    axes.set_title("Diabetes: do the intervals hold?", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _plain(axes)


def gap(axes: Axes, post: Posterior, training: tuple[Tensor, Tensor], line: tuple[Tensor, Tensor]) -> None:
    """A curve with the error bars of the posterior, and of the plain network, which knows of no gap."""
    predicted, x = post.predict(line[0]), line[0].flatten()
    mean, std, own = (t.flatten() for t in (predicted.mean, predicted.std, predicted.epistemic_std))
    axes.fill_between(x, mean - 2 * std, mean + 2 * std, color=POSTERIOR, alpha=0.16, lw=0, label="with noise (±2 sd)")
    axes.fill_between(x, mean - 2 * own, mean + 2 * own, color=POSTERIOR, alpha=0.32, lw=0, label="epistemic (±2 sd)")
    axes.plot(x, mean, color=POSTERIOR, lw=1.8, label="the network")
    if post.noises is not None:
        plain = float(post.noises.plain.sqrt())
        for sign, label in ((-2, None), (2, "plain network (±2 sd)")):
            axes.plot(x, mean + sign * plain, color=NETWORK, lw=1, ls="--", label=label)
    axes.plot(x, line[1].flatten(), color="black", lw=0.8, ls=":", label="the truth")
    axes.scatter(*(t.flatten() for t in training), s=9, color="black", alpha=0.55, lw=0, zorder=3)
    axes.set(xlim=(float(x.min()), float(x.max())), ylim=(-3.4, 3.4), xlabel="x", ylabel="y")
    axes.set_title("A gap in the data", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=7.5, loc="upper right", ncols=2)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
