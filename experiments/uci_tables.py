"""Tables of the UCI experiment, from the files of its networks."""

import math
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from scipy.stats import binomtest

from experiments import records

Files = list[dict[str, Any]]

PRIORS = ("single", "layer", "normalised", "tensor", "hyper", "gauge", "curvature", "curvature-layer")
MODELS = ("linear", "affine")
DEFAULT, TAYLOR = "curvature, linear", "curvature, affine"
"""What `ll.fit` does, and the same with the other model."""

NAIVE = {"naive, default prior": "naive, curvature", "naive, one precision": "naive, single"}
INVARIANT = {"layer", "tensor", "hyper", "gauge", "curvature", "curvature-layer", "normalised"}
WITHOUT_NORMALISED = {"normalised": "single", "gauge": "single"}
"""What these priors are on a network without normalised weights."""

COMPARED = ("plain", "plain, held-out noise", "5-ensemble", "naive, single", "naive, curvature")


@dataclass(frozen=True)
class Setting:
    """One set with one kind of network, on one kind of splits: the files to be averaged."""

    name: str
    net: str
    files: Files

    @property
    def title(self) -> str:
        """As a table's head."""
        return self.name + (", LN" if self.net == "layernorm" else "")

    def scores(self, method: str, of: str) -> list[dict[str, Any]]:
        """Scores of each network, none if some network lacks them."""
        prior = method.partition(",")[0]
        if self.net == "mlp" and prior in WITHOUT_NORMALISED:
            method = method.replace(prior, WITHOUT_NORMALISED[prior], 1)
        found = [f["methods"].get(method, {}).get("means", {}).get(of) for f in self.files]
        return [s for s in found if s] if all(found) else []

    def nll(self, method: str, of: str = "network") -> float | None:
        """Mean over the networks of the mean test NLL."""
        scores = self.scores(method, of)
        return mean(s["nll"] for s in scores) if scores else None

    def best(self, of: str = "network") -> tuple[str, float]:
        """The prior and model with the lowest NLL."""
        known = {m: self.nll(m, of) for m in candidates()}
        return min(((m, v) for m, v in known.items() if v is not None), key=lambda pair: pair[1])


def candidates() -> list[str]:
    """Every prior with every model."""
    return [f"{prior}, {model}" for prior in PRIORS for model in MODELS]


def fully_measured(parts: list[Setting]) -> list[Setting]:
    """The same settings with those of their networks on which every prior was measured with every model."""
    wanted = {"mlp": set(candidates()), "layernorm": set(candidates())}
    wanted["mlp"] -= {f"{prior}, {model}" for prior in WITHOUT_NORMALISED for model in MODELS}
    kept = [Setting(p.name, p.net, [f for f in p.files if wanted[p.net] <= f["methods"].keys()]) for p in parts]
    return [part for part in kept if part.files]


def settings(files: Files, kind: str) -> list[Setting]:
    """Every set with every kind of network."""
    own = [f for f in files if f["split"]["kind"] == kind]
    keys = sorted({(f["split"]["name"], f["split"]["net"]) for f in own}, key=lambda k: (k[0], k[1] != "mlp"))
    return [Setting(n, net, [f for f in own if (f["split"]["name"], f["split"]["net"]) == (n, net)]) for n, net in keys]


# ---- cells -----------------------------------------------------------------------------------------------


def shown(value: float | None, digits: int = 3) -> str:
    """A number, or a dash for what was not measured."""
    return "–" if value is None else f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.3g}"


def with_error(values: Sequence[float]) -> str:
    """Mean ± standard error over the networks."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{shown(mean(values))} ± {shown(error)}"


def nll_cell(setting: Setting, method: str, of: str) -> str:
    """Mean test NLL ± standard error over the networks."""
    scores = setting.scores(method, of)
    return with_error([s["nll"] for s in scores]) if scores else "–"


def paired_cell(part: Setting, method: str, reference: str, of: str) -> str:
    """Mean difference of the NLL from a reference around the network, ± over the networks."""
    pairs = zip(part.scores(method, of), part.scores(reference, "network"), strict=True)
    return with_error([own["nll"] - other["nll"] for own, other in pairs])


def coverage_cell(scores: list[dict[str, Any]]) -> str:
    """Share of targets in 90 % intervals with its binomial 95 % interval."""
    inside, n = sum(s["inside"] for s in scores), sum(s["n"] for s in scores)
    interval = binomtest(inside, n).proportion_ci(0.95)
    return f"{100 * inside / n:.1f} ({100 * interval.low:.1f}–{100 * interval.high:.1f})"


# ---- tables ----------------------------------------------------------------------------------------------


def overview(parts: list[Setting], methods: Iterable[tuple[str, str]]) -> str:
    """Methods down, settings across."""
    rows = [
        [method + (", linear mean" if of == "linear" else ""), *(nll_cell(p, method, of) for p in parts)]
        for method, of in methods
    ]
    best = ["best prior and model", *(f"{shown(p.best()[1])} ({p.best()[0]})" for p in parts)]
    return records.table(["method", *(p.title for p in parts)], [*rows, best])


def verdicts(parts: list[Setting], method: str, of: str) -> str:
    """A method against plain and naive, and its coverage, for each setting and for each set."""
    references = {"plain": "plain"} | NAIVE
    rows = []
    for part in [*parts, *both_nets(parts)]:
        scores = part.scores(method, of)
        if scores:
            against = [paired_cell(part, method, reference, of) for reference in references.values()]
            rows.append([part.title, *against, coverage_cell(scores), shown(mean(s["rmse"] for s in scores))])
    heads = ["set", *(f"minus {name}" for name in references), "coverage of 90 % intervals, %", "RMSE"]
    return records.table(heads, rows)


def models(kinds: dict[str, list[Setting]]) -> str:
    """Which of the two models is better around the network, and which one the evidence prefers, network by network."""
    rows = []
    for kind, parts in kinds.items():
        pairs = [(f["methods"][DEFAULT], f["methods"][TAYLOR]) for p in parts for f in p.files]
        nll = [[m["means"]["network"]["nll"] for m in pair] for pair in pairs]
        better = sum(linear < affine for linear, affine in nll)
        preferred = sum(linear["log_evidence"] > affine["log_evidence"] for linear, affine in pairs)
        means = [shown(mean(column)) for column in zip(*nll, strict=True)]
        rows.append([kind, *means, f"{better} of {len(pairs)}", f"{preferred} of {len(pairs)}"])
    heads = ["splits", "NLL, linear", "NLL, affine", "linear has the lower NLL", "linear has the higher evidence"]
    return records.table(heads, rows)


def both_nets(parts: list[Setting]) -> list[Setting]:
    """Settings that pool the two kinds of network of a set."""
    names = dict.fromkeys(p.name for p in parts)
    return [Setting(f"{n}, both", "both", [f for p in parts if p.name == n for f in p.files]) for n in names]


def choice(parts: list[Setting], of: str) -> str:
    """Priors × models down: NLL in every setting, mean, mean rank, and how much worse than the best at worst."""
    known = {m: [p.nll(m, of) for p in parts] for m in candidates()}
    complete = {m: [v for v in values if v is not None] for m, values in known.items() if None not in values}
    lowest = [min(column) for column in zip(*complete.values(), strict=True)]
    heads = ["prior, model", "invariant", *(p.title for p in parts), "mean", "mean rank", "worst regret", "coverage, %"]
    rows = []
    for method, values in known.items():
        invariant = "yes" if method.partition(",")[0] in INVARIANT else "no"
        cells = [method, invariant, *(shown(v) for v in values)]
        rows.append([*cells, *ranking(method, complete, lowest), coverage_of(parts, method, of)])
    return records.table(heads, rows)


def measured(parts: list[Setting]) -> str:
    """On how many networks every prior was measured."""
    counts = [f"{len(part.files)} of {part.title}" for part in fully_measured(parts)]
    return f"Networks on which all of them were measured: {'; '.join(counts)}."


def ranking(method: str, complete: dict[str, list[float]], lowest: list[float]) -> list[str]:
    """Mean, mean rank and worst regret among the methods that were measured everywhere."""
    if method not in complete:
        return ["–"] * 3
    own = complete[method]
    ranks = [1 + sum(other[i] < own[i] for other in complete.values()) for i in range(len(own))]
    regret = max(v - low for v, low in zip(own, lowest, strict=True))
    return [shown(mean(own)), shown(mean(ranks), 1), shown(regret)]


def coverage_of(parts: list[Setting], method: str, of: str) -> str:
    """Mean coverage over the settings that were measured."""
    shares = [
        sum(s["inside"] for s in found) / sum(s["n"] for s in found) for p in parts if (found := p.scores(method, of))
    ]
    return f"{100 * mean(shares):.1f}" if shares else "–"


def troubles(files: Files) -> str:
    """Searches that did not converge."""
    found = [
        [
            f"{f['split']['name']} {f['split']['kind']}{f['split']['index']} {f['split']['net']}",
            method,
            result["message"],
        ]
        for f in files
        for method, result in f["methods"].items()
        if not result.get("converged", True)
    ]
    fits = sum("converged" in result for f in files for result in f["methods"].values())
    return f"{len(found)} of {fits} fits.\n\n" + (
        records.table(["network", "method", "message"], found) if found else ""
    )


def table(arguments: Namespace) -> None:  # noqa: ARG001
    """Write uci.md."""
    files = [records.read(path) for path in sorted((records.RESULTS / "uci").glob("*.json"))]
    rows = [(m, "network") for m in COMPARED]
    for method in (DEFAULT, TAYLOR):
        rows += [(m, of) for m in (method, f"{method}, held out") for of in ("network", "linear")]
    kinds = {kind: settings(files, kind) for kind in ("standard", "gap")}
    parts = [HEAD]
    for kind, own in kinds.items():
        parts += [
            f"## {kind.capitalize()} splits: test NLL\n\n{overview(own, rows)}",
            f"## The default ({DEFAULT}) on {kind} splits, network mean\n\n{DIFFERENCES}\n\n"
            f"{verdicts(own, DEFAULT, 'network')}",
            f"## The same with held-out scales\n\n{verdicts(own, DEFAULT + ', held out', 'network')}",
            f"## The Taylor model ({TAYLOR}) on {kind} splits, network mean\n\n{verdicts(own, TAYLOR, 'network')}",
        ]
    parts.append(f"## Which model\n\n{models(kinds)}")
    for kind, own in kinds.items():
        parts += [
            f"## Priors and models, {kind} splits, {of} mean\n\n"
            f"{CHOICE + chr(10) * 2 if (kind, of) == ('standard', 'network') else ''}{measured(own)}\n\n"
            f"{choice(fully_measured(own), of)}"
            for of in ("network", "linear")
        ]
    parts.append(f"## Searches that did not converge\n\n{troubles(files)}")
    records.write(records.RESULTS / "uci.md", "\n\n".join(p.rstrip("\n") for p in parts) + "\n")


HEAD = """# UCI regression

yacht, concrete, kin8nm, protein: at most 2000 rows of the training part of a split (of which a sixth stopped the training and
five sixths gave the gradients and the posterior) and at most 1000 of its test part, standard splits 0–4, gap splits 0–1.
Networks d-50-50-1 with ReLU, with layer norm (LN) or without; float64. All numbers are in units of the training targets'
standard deviation, the NLL in nats a point, so that 1.42 is what knowing nothing gives. ± is the standard error over the
networks (splits). *plain*: the network with the maximum-likelihood noise of its training residuals; *naive*: the evidence at the
trained weights; *held out*: scales (or plain noise) learnt on the sixth that stopped the training; *5-ensemble*: an equal
mixture of five plain networks. Without *linear mean* the mean is the network's own output."""

DIFFERENCES = """Paired differences of the NLL from that of other methods: below zero is better. ± over the networks; in
brackets the binomial 95 % interval of the coverage."""

CHOICE = """Mean NLL. *rank* and *regret* (nats above the best in the setting where that is largest) are among the priors and
models that were measured on every network. Without normalised weights *normalised* and *gauge* are *single*. *invariant*:
to the scale of normalised weights."""
