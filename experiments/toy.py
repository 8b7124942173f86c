"""The paper's first figure: error bars of a 1-50-50-1 network between and beyond three clouds of points.

With the evidence taken at the trained weights they exceed the standard deviation of the targets, which is what one
would say of y knowing nothing; with the evidence at θ⋆ they do not.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Adam

import linlap as ll
from experiments import datasets, records
from experiments.architectures import toy_mlp
from experiments.datasets import Examples

SEEDS = range(5)
STEPS, LEARNING_RATE = 10_000, 1e-2  # Adam on all points at once
GRID = 400
METHODS: dict[str, dict[str, Any]] = {
    "naive, one precision": {"evidence_at": "trained", "prior": "single"},
    "naive, default prior": {"evidence_at": "trained"},
    "θ⋆, linear, one precision": {"model": "linear", "prior": "single"},
    "θ⋆, linear, default prior": {"model": "linear"},
    "θ⋆, affine, one precision": {"model": "affine", "prior": "single"},
    "θ⋆, affine, default prior": {"model": "affine"},
}
DRAWN = (
    "naive, one precision",
    "θ⋆, linear, one precision",
    "θ⋆, linear, default prior",
    "θ⋆, affine, default prior",
)
PARAMS: dict[str, str | None] = {"2600 weights": "weights", "2701 weights and biases": None}


def add_arguments(command: ArgumentParser) -> None:
    """The flags of `run toy`."""
    datasets.add_data_argument(command)


def run(arguments: Namespace) -> None:
    """Train five networks, fit each in every way, write toy.json."""
    train, test = (datasets.toy("my_1d", part, data=arguments.data, dtype=torch.float64) for part in ("train", "test"))
    fits, curves = [], {}
    for seed in SEEDS:
        net = trained(train, seed)
        for params, chosen in PARAMS.items():
            for method, options in METHODS.items():
                post = ll.fit(net, tuple(train), "regression", params=chosen, progress=False, **options)
                fits.append({"seed": seed, "params": params, "method": method} | measured(post, train, test))
                print(fits[-1], flush=True)
                if seed == SEEDS[0]:
                    curves.setdefault(params, {})[method] = curve(post, grid(train, margin=0.5))
    setting = {"steps": STEPS, "learning_rate": LEARNING_RATE, "target_std": float(train.y.std())}
    points = {"x": rounded(train.x), "y": rounded(train.y)}
    content = {"setting": setting, "versions": records.versions(), "fits": fits, "points": points, "curves": curves}
    records.write(records.RESULTS / "toy.json", content)


def trained(train: Examples, seed: int) -> nn.Module:
    """A float64 network, its squared error minimised by Adam for long."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = toy_mlp().double()
    optimiser = Adam(net.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimiser.zero_grad()
        mse_loss(net(train.x), train.y).backward()
        optimiser.step()
    return net.eval()


def grid(train: Examples, margin: float = 0.0) -> Tensor:
    """Inputs `[n, 1]` over the range of the data."""
    low, high = float(train.x.min()) - margin, float(train.x.max()) + margin
    return torch.linspace(low, high, GRID, dtype=torch.float64).unsqueeze(1)


def measured(post: ll.Posterior, train: Examples, test: Examples) -> dict[str, Any]:
    """Error bars over the range of the data in units of the targets' standard deviation, and test scores."""
    bars = post.predict(grid(train)).std / train.y.std()
    return {
        "mean_std": float(bars.mean()),
        "largest_std": float(bars.max()),
        "share_above_target_std": float((bars > 1).double().mean()),
        "test_nll": -float(post.predict(test.x).log_prob(test.y).mean()),
        "noise": post.noise,
        "log_evidence": post.log_evidence,
        "converged": post.status.converged,
    }


def curve(post: ll.Posterior, x: Tensor) -> dict[str, list[float]]:
    """What the figure draws."""
    predicted = post.predict(x)
    return {"x": rounded(x), "mean": rounded(predicted.mean), "std": rounded(predicted.std)}


def rounded(values: Tensor) -> list[float]:
    """Four digits, enough to draw."""
    return [round(v, 4) for v in values.flatten().tolist()]


# ---- table and figure ------------------------------------------------------------------------------------


def table(arguments: Namespace) -> None:  # noqa: ARG001
    """Write toy.md and toy.png from toy.json."""
    content = records.read(records.RESULTS / "toy.json")
    heads = ["weights", "method", "mean", "largest", "share of the range above 1", "test NLL", "converged"]
    rows = [row(content["fits"], params, method) for params in PARAMS for method in METHODS]
    text = (
        f"# Toy regression\n\nA 1-50-50-1 network on my_1d; Adam, {STEPS} steps, {len(SEEDS)} seeds: mean (smallest to largest). "
        "The standard deviation of the predictive distribution (noise included) on a grid over the range of the data, "
        "gaps included, in units of the targets' standard deviation.\n\n"
    )
    records.write(records.RESULTS / "toy.md", text + records.table(heads, rows) + "\n![figure](toy.png)\n")
    draw(content)


def row(fits: list[dict], params: str, method: str) -> list[str]:
    """One line of the table."""
    own = [f for f in fits if f["params"] == params and f["method"] == method]

    def spread(key: str) -> str:
        values = [f[key] for f in own]
        return f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    numbers = [spread(k) for k in ("mean_std", "largest_std", "share_above_target_std", "test_nll")]
    return [params, method, *numbers, f"{sum(f['converged'] for f in own)} of {len(own)}"]


def draw(content: dict[str, Any]) -> None:
    """Data, mean and two standard deviations."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(PARAMS), len(DRAWN), figsize=(13, 5.6), sharex=True, sharey=True, layout="constrained"
    )
    points, spread = content["points"], content["setting"]["target_std"]
    middle = sum(points["y"]) / len(points["y"])
    for params, line in zip(PARAMS, axes, strict=True):
        for method, axis in zip(DRAWN, line, strict=True):
            band(axis, content["curves"][params][method])
            axis.axhspan(middle - 2 * spread, middle + 2 * spread, color="0.5", alpha=0.15, lw=0, zorder=0)
            axis.plot(points["x"], points["y"], "k.", ms=2)
            axis.set(title=f"{method}\n{params}", ylim=(-6, 6))
    figure.suptitle("Network output ± 2 standard deviations; grey: ± 2 standard deviations of the targets")
    figure.savefig(records.RESULTS / "toy.png", dpi=90)


def band(axis: Any, drawn: dict[str, list[float]]) -> None:
    """Mean and two standard deviations to each side."""
    low, high = ([m + sign * 2 * s for m, s in zip(drawn["mean"], drawn["std"], strict=True)] for sign in (-1, 1))
    axis.plot(drawn["x"], drawn["mean"], color="C0")
    axis.fill_between(drawn["x"], low, high, color="C0", alpha=0.3, lw=0)
