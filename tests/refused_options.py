"""Options that are refused, and what is warned about."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linlap as ll
from linlap import errors
from linlap.curvature import linalg
from refusals import Refused, X, Y, classification, cls, in_batches, on, reg, regression

CAME_TWICE = "two passes over the data must yield the same examples, but they yielded 20 and 15 examples: switch off …"
DROPS_LAST = DataLoader(TensorDataset(X, Y), batch_size=6, drop_last=True)
ONE_OF = " must be one of …, but it is {}: choose one of these"
MEMORY = 'memory must be a number of bytes or a text such as "4GiB", but it is {}: write it like one of these'
NOISE = "noise is a standard deviation and must be > 0, but it is {}: give a positive number"
LEVEL = "level must lie between 0 and 1, but it is {}: 0.9 gives 90 % intervals"
PATTERNS = "the patterns of a group must be a text or a list of texts, but those of 'a' are {}: write them like …"


ARGUMENTS = {
    "likelihood": Refused(
        errors.InputError, reg(likelihood="gauss"), "likelihood must be \"regression\", …, but it is 'gauss': choose …"
    ),
    "likelihood, a class": Refused(
        errors.InputError, reg(likelihood=ll.Gaussian), "likelihood must be …, but it is …: …with its brackets"
    ),
    "likelihood, a list": Refused(
        errors.InputError, reg(likelihood=["regression"]), "likelihood must be …, but it is …: choose …"
    ),
    **{
        name: Refused(errors.InputError, reg(**{name: "other"}), name + ONE_OF.format("'other'"))
        for name in ("model", "evidence_at", "hessian_at", "solver", "update")
    },
    "mean": Refused(errors.InputError, lambda: regression().predict(X, mean="map"), "mean" + ONE_OF.format("'map'")),
    "prior": Refused(
        errors.InputError, reg(prior="layers"), "prior must be one of …, but it is 'layers': choose one of these"
    ),
    "prior, none": Refused(
        errors.InputError, reg(prior=None), "prior must be one of …, but it is None: choose one of these"
    ),
    "prior, incomplete": Refused(
        errors.InputError,
        reg(prior={"a": "weight"}),
        'every weight must belong to a group, but "bias" …: add a last group …',
    ),
    "prior, empty group": Refused(
        errors.InputError,
        reg(prior={"a": "*", "b": ["bias"]}),
        "every group must hold a weight, but no … of ['b']: mend them, …",
    ),
    "prior, numbers": Refused(errors.InputError, reg(prior={"a": 3}), PATTERNS.format("3")),
    "prior, list of numbers": Refused(errors.InputError, reg(prior={"a": [3]}), PATTERNS.format("[3]")),
    "curvature": Refused(
        errors.InputError, reg(curvature="full"), "curvature must be …, but it is 'full': choose one of these"
    ),
    "memory": Refused(errors.InputError, reg(memory="much"), MEMORY.format("'much'")),
    "memory, no number": Refused(errors.InputError, reg(memory="1.2.3GiB"), MEMORY.format("'1.2.3GiB'")),
    "memory, zero": Refused(errors.InputError, reg(memory=0), MEMORY.format("0")),
    "memory, negative": Refused(errors.InputError, reg(memory=-1), MEMORY.format("-1")),
    "nothing fits": Refused(
        errors.InputError,
        reg(memory=10),
        "the curvature must fit 9.31e-09 GiB …, but 4 weights … need dense 5.…: pass memory= …",
    ),
    "one does not fit": Refused(
        errors.InputError,
        reg(memory=10, curvature="dual"),
        "the curvature must fit …, but … need dual …: pass memory= if …",
    ),
    "noise": Refused(errors.InputError, lambda: ll.Gaussian(noise=0.0), NOISE.format("0.0")),
    "noise, NaN": Refused(errors.InputError, lambda: ll.Gaussian(noise=float("nan")), NOISE.format("nan")),
    "noise, one negative": Refused(
        errors.InputError, lambda: ll.Gaussian(noise=torch.tensor([1.0, -1.0])), NOISE.format("tensor…")
    ),
    "noise, a text": Refused(errors.InputError, lambda: ll.Gaussian(noise="small"), NOISE.format("small")),
    "noise of three": Refused(
        errors.ShapeError,
        reg(likelihood=ll.Gaussian(noise=torch.ones(3))),
        "noise must be one …, but 3 came for 1 outputs: give one …",
    ),
    "noise unknown": Refused(
        errors.InputError,
        lambda: ll.Gaussian().output_precision,
        "the noise must be known here, but it is still …: fit first, or …",
    ),
    "level 0": Refused(errors.InputError, lambda: regression().predict(X).interval(0), LEVEL.format(0)),
    "level 90": Refused(errors.InputError, lambda: regression().predict(X).interval(90), LEVEL.format(90)),
    "interval of classes": Refused(
        errors.InputError,
        lambda: classification().predict(X).interval(),
        "interval needs a regression, but … categorical: use probs",
    ),
    "probs of a regression": Refused(
        errors.InputError,
        lambda: regression().predict(X).probs(),
        "probs needs class labels, but … gaussian: use mean, std, …",
    ),
    "method": Refused(
        errors.InputError,
        lambda: classification().predict(X).probs("exact"),
        "method must be …, but it is 'exact': choose …",
    ),
    "compare nothing": Refused(
        errors.InputError, lambda: ll.compare({}), "compare needs at least one …, but it got none: pass {name: …"
    ),
    "compare a list": Refused(
        errors.InputError, lambda: ll.compare([regression()]), "compare takes …, but it got a list: pass {name: …"
    ),
    "compare numbers": Refused(
        errors.InputError, lambda: ll.compare({"a": 1}), "compare takes …, but it got a dict: pass {name: …"
    ),
    "no draws": Refused(
        errors.InputError,
        lambda: regression().sample(0),
        "draws must be a whole number of at least 1, but it is 0: ask for some",
    ),
    "false alarms": Refused(
        errors.InputError,
        lambda: regression().predict(X).unfamiliar(5),
        "false_alarms must lie between 0 and 1, but it is 5: 0.05 …",
    ),
    "compare other data": Refused(
        errors.InputError,
        lambda: ll.compare({"a": regression(), "b": classification()}),
        "evidences compare only for the same data and likelihood, but these differ: …: fit all of them to the same data",
    ),
    "not definite": Refused(
        errors.NotPositiveDefiniteError,
        lambda: linalg.cholesky(torch.diag(torch.tensor([1.0, -1.0]))),
        "a curvature matrix plus prior must be positive definite, but its … at row 2 of 2, …: check the inputs' scale, …",
    ),
}


class Changing:
    """Another number of examples at every pass."""

    passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self.passes += 1
        return iter(in_batches(X)[self.passes - 1 :])


def overconfident() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(3, 2).double()
        nn.init.normal_(module.weight, std=30.0)
    return cls(module=module)()


norm = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()
WARNINGS = {
    "another pass": Refused(errors.DataWarning, on(Changing()), CAME_TWICE),
    "drop_last": Refused(
        errors.DataWarning, on(DROPS_LAST), "a pass …must yield every example, but drop_last left 2 out: switch …"
    ),
    "n_data": Refused(
        errors.DataWarning, reg(n_data=30), "a pass over the data should yield n_data=30 …, but it yielded 20: the …"
    ),
    "few held out": Refused(
        errors.DataWarning, reg(held_out=(X, Y)), "held_out should hold at least 30 …, but it holds 20: pass more, …"
    ),
    "prior": Refused(
        errors.InvarianceWarning,
        reg(module=norm, prior="single"),
        "the scale of normalised weights is arbitrary, …: error bars … it. Use prior=…",
    ),
    "rounds": Refused(
        errors.ConvergenceWarning, reg(most_rounds=1), "the search did not converge: …pass most_rounds= for more"
    ),
    "overconfident": Refused(
        errors.EvidenceWarning, overconfident, "the curvature at the trained network is only …: the network is …"
    ),
    "jitter": Refused(
        errors.NumericsWarning,
        lambda: linalg.cholesky(torch.ones(3, 3).double() - 1e-13 * torch.eye(3)),
        "a curvature matrix was not positive definite to rounding; 1e-12 …: use a float64 network for more digits",
    ),
}
