"""Tables of the digits experiment, from the files of its networks."""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from experiments import records
from experiments.uci_tables import INVARIANT, MODELS, PRIORS, WITHOUT_NORMALISED, paired_cell, ranking, shown

Files = list[dict[str, Any]]

NETS = ("cnn", "resnet", "pre_resnet", "fixup_resnet", "transformer", "cnn-uncropped", "resnet-uncropped")
LINKS = ("probit", "mc")
REFRESHED = "curvature, linear, refreshed"
"""The curvature refreshed at the optimum of the linear model, until it stays."""

MEANS = ("network", "linear")


@dataclass(frozen=True)
class Setting:
    """One architecture: the files to be averaged."""

    name: str
    files: Files

    def results(self, method: str) -> list[dict[str, Any]]:
        """What a method found on each network, nothing if some network lacks it."""
        found = [f["methods"].get(known_as(method, f)) for f in self.files]
        return [r for r in found if r] if all(found) else []

    def scores(self, method: str, of: str) -> list[dict[str, Any]]:
        """Scores of probabilities, such as those of `network, probit`."""
        found = [r["scores"].get(of) for r in self.results(method)]
        return [s for s in found if s] if all(found) else []

    def average(self, method: str, of: str, metric: str) -> float | None:
        """Mean over the networks."""
        found = self.scores(method, of)
        return mean(s[metric] for s in found) if found else None


def known_as(method: str, file: dict[str, Any]) -> str:
    """Without normalised weights two priors are `single`."""
    prior = method.partition(",")[0]
    if prior in WITHOUT_NORMALISED and not file["setting"]["normalised"]:
        return method.replace(prior, WITHOUT_NORMALISED[prior], 1)
    return method


def settings(files: Files) -> list[Setting]:
    """The architectures that were measured."""
    own = {name: [f for f in files if f["network"]["name"] == name] for name in NETS}
    return [Setting(name, found) for name, found in own.items() if found]


def candidates() -> list[str]:
    """Every prior with every model."""
    return [f"{prior}, {model}" for prior in PRIORS for model in MODELS]


# ---- tables ----------------------------------------------------------------------------------------------


def networks(parts: list[Setting]) -> str:
    """What was trained."""
    rows = []
    for part in parts:
        about = [f["setting"] for f in part.files]
        plain = part.scores("plain", "network, plug-in")
        rows.append(
            [
                part.name,
                f"{about[0]['weights']:,}",
                str(len(about)),
                str(about[0]["epochs"]),
                "yes" if about[0]["normalised"] else "no",
                shown(mean(s["training_nll"] for s in about)),
                shown(100 * mean(s["training_accuracy"] for s in about), 1),
                shown(mean(s["nll"] for s in plain)) if plain else "–",
                shown(100 * mean(s["accuracy"] for s in plain), 1) if plain else "–",
            ]
        )
    heads = ["network", "weights", "networks", "epochs", "normalised weights"]
    return records.table([*heads, "training NLL", "training accuracy, %", "test NLL", "test accuracy, %"], rows)


def across(parts: list[Setting], rows: Sequence[tuple[str, str]], cell: Callable[[Setting, str, str], str]) -> str:
    """Methods down, architectures across."""
    lines = [[method, of, *(cell(part, method, of) for part in parts)] for method, of in rows]
    return records.table(["method", "mean, link", *(p.name for p in parts)], lines)


def nll_and_ece(part: Setting, method: str, of: str) -> str:
    """NLL (ECE)."""
    nll, ece = (part.average(method, of, metric) for metric in ("nll", "ece"))
    return "–" if nll is None or ece is None else f"{nll:.3f} ({100 * ece:.1f})"


def separation(part: Setting, method: str, of: str) -> str:
    """Areas under the ROC curve by entropy, by epistemic variance."""
    by_entropy, found = part.average(method, of, "auroc_entropy"), part.results(method)
    if by_entropy is None:
        return "–"
    epistemic = [r["auroc_epistemic"] for r in found if "auroc_epistemic" in r]
    return f"{by_entropy:.3f}" + (f", {mean(epistemic):.3f}" if epistemic else "")


def accuracy(part: Setting, method: str, of: str) -> str:
    """Accuracy in per cent, Brier score."""
    right, brier = (part.average(method, of, metric) for metric in ("accuracy", "brier"))
    return "–" if right is None or brier is None else f"{100 * right:.1f}, {brier:.4f}"


def against_plain(part: Setting, method: str, of: str) -> str:
    """Paired difference of the NLL."""
    found = part.scores(method, of)
    return paired_cell(found, "plain") if found else "–"


def choice(parts: list[Setting], of: str) -> str:
    """Priors × models: NLL of each architecture, mean, mean rank, worst regret, mean ECE."""
    known = {m: [p.average(m, of, "nll") for p in parts] for m in candidates()}
    complete = {m: [v for v in values if v is not None] for m, values in known.items() if None not in values}
    lowest = [min(column) for column in zip(*complete.values(), strict=True)]
    rows = []
    for method, values in known.items():
        ece = [p.average(method, of, "ece") for p in parts]
        ece_cell = "–" if None in ece else shown(100 * mean(e for e in ece if e is not None), 1)
        invariant = "yes" if method.partition(",")[0] in INVARIANT else "no"
        rows.append([method, invariant, *(shown(v) for v in values), *ranking(method, complete, lowest), ece_cell])
    heads = ["prior, model", "invariant", *(p.name for p in parts), "mean", "mean rank", "worst regret", "ECE, %"]
    return records.table(heads, rows)


def links(parts: list[Setting], methods: Sequence[str]) -> str:
    """MC minus probit."""
    rows = []
    for method in methods:
        for of in MEANS:
            pairs = [[p.scores(method, f"{of}, {link}") for link in LINKS] for p in parts]
            if not any(all(pair) for pair in pairs):
                continue
            cells = []
            for metric, factor, digits in (("nll", 1, 4), ("ece", 100, 2), ("auroc_entropy", 1, 3)):
                both = [
                    factor * mean(m[metric] - q[metric] for q, m in zip(*pair, strict=True))
                    for pair in pairs
                    if all(pair)
                ]
                cells.append(f"{mean(both):+.{digits}f} ({min(both):+.{digits}f} to {max(both):+.{digits}f})")
            rows.append([method, of, *cells])
    return records.table(["method", "mean", "NLL", "ECE, %", "AUROC by entropy"], rows)


def learnt(parts: list[Setting]) -> str:
    """Log evidence, effective dimensions, seconds of each fit."""
    rows = []
    for method in ["naive, single", "naive, curvature", "naive, tensor", *candidates(), REFRESHED]:
        cells = []
        for part in parts:
            found = [] if method != known_as(method, part.files[0]) else part.results(method)
            if not found:
                cells.append("–")
                continue
            numbers = (mean(r[key] for r in found) for key in ("log_evidence", "effective_dimensions", "seconds"))
            evidence, dims, seconds = numbers
            cells.append(f"{evidence:.0f}, {dims:.0f}, {seconds:.0f} s")
        rows.append([method, *cells])
    return records.table(["method", *(p.name for p in parts)], rows)


def scales(parts: list[Setting]) -> str:
    """Precisions of the priors with one, and the factor that held-out data put on the variance."""
    rows = []
    for part in parts:
        for f in part.files:
            found = f["methods"]
            for method in candidates():
                held = found.get(f"{method}, held out")
                if held is None:
                    continue
                values = sorted(found[method]["prior"].values())
                middle = math.exp(mean(math.log(v) for v in values))
                cells = [f"{values[0]:.3g}", f"{middle:.3g}", f"{values[-1]:.3g}"]
                factors = [f"{held['scales'][of]:.3g}" for of in MEANS]
                rows.append([f"{part.name} {f['network']['seed']}", method, *cells, *factors])
            for link in LINKS:
                oracle = found.get(f"oracle, {link}")
                if oracle:
                    value = f"{next(iter(oracle['prior'].values())):.3g}"
                    rows.append([f"{part.name} {f['network']['seed']}", f"oracle, {link}", *[value] * 3, "–", "–"])
    heads = ["network", "method", "least precision", "geometric mean", "greatest"]
    return records.table([*heads, "held-out factor, network mean", "linear mean"], rows)


def troubles(files: Files) -> str:
    """Searches that did not converge."""
    found, fits = [], 0
    for f in files:
        for method, result in f["methods"].items():
            if "converged" not in result or method.endswith("held out"):
                continue
            fits += 1
            if not result["converged"]:
                found.append([f"{f['network']['arch']} {f['network']['seed']}", method, result["message"]])
    table = records.table(["network", "method", "message"], found) if found else ""
    return f"{len(found)} of {fits} fits.\n\n{table}"


def table(arguments: Namespace) -> None:  # noqa: ARG001
    """Write digits.md."""
    files = [records.read(path) for path in sorted((records.RESULTS / "digits").glob("*.json"))]
    parts = settings(files)
    plain = [("plain", "network, plug-in"), ("temperature", "network, plug-in")]
    network = [
        (method, f"network, {link}")
        for method in ("naive, single", "naive, curvature", "naive, tensor", *candidates(), REFRESHED)
        for link in LINKS
    ]
    oracle = [(f"oracle, {link}", f"network, {link}") for link in LINKS]
    linear = [(method, f"linear, {link}") for method in (*candidates(), REFRESHED) for link in LINKS]
    held = [
        (f"{prior}, {model}, held out", f"{of}, {link}")
        for prior in ("single", "curvature")
        for model in MODELS
        for of in MEANS
        for link in LINKS
    ]
    everything = [*plain, *network, *oracle, *linear, *held]
    compared = ["naive, single", "naive, curvature", *candidates()]
    held_out = [f"{p}, {m}, held out" for p in ("single", "curvature") for m in MODELS]
    sections = [
        HEAD,
        f"## Networks\n\n{networks(parts)}",
        f"## Test NLL (ECE, %)\n\n{across(parts, everything, nll_and_ece)}",
        f"## NLL minus that of the plain network\n\n{PAIRED}\n\n{across(parts, everything, against_plain)}",
        *(
            f"## Priors and models, {of} mean, {link}\n\n{CHOICE}\n\n{choice(parts, f'{of}, {link}')}"
            for of in MEANS
            for link in LINKS
        ),
        f"## MNIST against KMNIST\n\n{SEPARATION}\n\n{across(parts, everything, separation)}",
        f"## MC minus probit\n\n{LINK}\n\n{links(parts, [*compared, *held_out])}",
        f"## Accuracy in per cent, Brier score\n\n{across(parts, everything, accuracy)}",
        f"## Log evidence, effective dimensions, seconds\n\n{LEARNT}\n\n{learnt(parts)}",
        f"## Precisions and held-out scales\n\n{scales(parts)}",
        f"## Searches that did not converge\n\n{troubles(files)}",
    ]
    records.write(records.RESULTS / "digits.md", "\n\n".join(s.rstrip("\n") for s in sections) + "\n")


HEAD = """# Digits

Tiny networks of the paper's architectures, trained by its recipes (random crops included) on the first 4000 images of
MNIST; the posterior is given the same images, uncropped. *uncropped* networks were trained without random crops, so that
they have memorised their images. Test: every fifth MNIST test image (2000); unfamiliar: every fifth KMNIST test image.
Held out: the next 500 training images, on which *temperature* and *held out* learn one number each. Float32. *network*
and *linear* say around which mean; *naive* is the evidence at the trained weights; *refreshed* has the curvature at θ⋆
instead of at the trained network. *oracle*: one precision, the best of a grid (half decades, from one below to four above
that of *single, linear*) for every fourth test label itself: a bound, not a method. NLL in nats an image; ECE with 15 bins;
MC with 1000 samples. Numbers are means over the networks (seeds) of an
architecture; a dash: not measured on all of them."""

PAIRED = "Below zero is better. ± over the networks of an architecture; in brackets the standard error over all images."

CHOICE = """*rank* and *regret* (nats above the best on the architecture where that is largest) are among the priors and
models that were measured everywhere. Without normalised weights *normalised* and *gauge* are *single*."""

SEPARATION = """Area under the ROC curve by predictive entropy, then by the epistemic score (the total variance of the
logits; the same for every mean and link)."""

LINK = "Mean over the architectures (least to greatest); below zero is better for NLL and ECE, above for AUROC."

LEARNT = """Seconds of one core, other processes beside it, for fit and scores (held-out calibration included where there
is one), without H at the trained network and the Jacobians of the test images, which are shared."""
