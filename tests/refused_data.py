"""Data and targets that are refused."""

import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import linlap as ll
from linlap import errors
from linlap.curvature.dual import Dual
from refusals import (
    INF,
    NAN,
    K,
    Refused,
    X,
    Y,
    cls,
    in_batches,
    net,
    on,
    reg,
    regression,
    set_at,
    weighted,
)

NOT_FINITE = "but batch 0 holds {} NaN or infinite numbers: clean or impute them"
ROWS = "inputs and targets must have one row for each example, but "
BATCH = "a batch must be (x, y), (x, y, weights) or a dict with 'labels', but batch 0 is {}: wrap the loader so that …"
WEIGHTS = (
    "example weights must be one finite number ≥ 0 for each of the 20 examples, but they have shape {} and {} of …: …"
)
CLASSES = (
    "labels must lie in 0 … 1 for 2 outputs, but {} do not, for example {}: recode the labels, or give the network …"
)
COUNTS = "Poisson targets must be counts 0, 1, 2, …, but {} of 20 are negative or fractional: pass counts"
SHAPE = (
    "{} targets must have the outputs' shape [n, {}], but they have shape {}: reshape the targets, nothing is broadcast"
)
LABELS = (
    "class labels must have the outputs' shape [n, 2] without its class axis, but they have shape {}: pass integer …"
)
TAKES = "predict takes what the network takes, or a loader, but it got a {}: pass a tensor, a tuple, a dict, …"


def sized() -> ll.Predictive:
    """A prediction for sequences longer than those of the fit."""
    conv = nn.Conv1d(1, 2, 1).double()
    post = ll.fit(conv, (torch.randn(9, 1, 5).double(), torch.zeros(9, 5).long()), "classification", progress=False)
    return post.predict(torch.randn(2, 1, 7).double())


class Plain(nn.Module):
    """Takes something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor, beside: object) -> torch.Tensor:
        return self.layer(x)


def kept_beside_an_object(folder: str = tempfile.gettempdir()) -> object:
    data = [({"x": X, "beside": object()}, Y)]
    post = ll.fit(Plain(), data, "regression", curvature=Dual(), memory=1_000, progress=False)
    return ll.save(post, f"{folder}/refused.safetensors")


DATA = {
    "an object among saved inputs": Refused(
        errors.InputError, kept_beside_an_object, "inputs must consist of …, but '0.beside/' is a object: make it …"
    ),
    "nothing to predict": Refused(
        errors.DataError, lambda: regression().predict(X[:0]), "predict needs at least one input, but not one came: …"
    ),
    "no batch to predict": Refused(
        errors.DataError, lambda: regression().predict([]), "predict needs at least one input, but not one came: …"
    ),
    "complex targets": Refused(
        errors.TargetError,
        reg(y=Y.to(torch.complex128)),
        "regression targets must be real numbers, but they are torch.complex128: give …",
    ),
    "NaN input": Refused(errors.DataError, reg(NAN), "inputs must be finite, " + NOT_FINITE.format(60)),
    "NaN in a later batch": Refused(
        errors.DataError,
        on(in_batches(set_at(X, (13, 1), -torch.inf))),
        "inputs must be finite, but batch 2 holds 1 …: clean …",
    ),
    "NaN to predict": Refused(
        errors.DataError,
        lambda: regression().predict([X, NAN]),
        "inputs must be finite, but batch 1 holds 60 …: clean or …",
    ),
    "NaN to evaluate": Refused(
        errors.DataError, lambda: ll.evaluate(regression(), (NAN, Y)), "inputs must be finite, but …: clean …"
    ),
    "NaN to inspect": Refused(
        errors.DataError, lambda: ll.inspect(net(), NAN), "inputs must be finite, but batch 0 …: clean …"
    ),
    "infinite target": Refused(
        errors.TargetError, reg(y=INF), "targets must be finite, but 20 of 20 are NaN …: remove these …"
    ),
    "no batch": Refused(
        errors.DataError, on([]), "the data must hold at least one example, but not one came: check the loader, …"
    ),
    "no row": Refused(
        errors.DataError, reg(X[:0], Y[:0]), "the data must hold at least one example, but not one came: check …"
    ),
    "nothing to inspect": Refused(
        errors.DataError,
        lambda: ll.inspect(net(), X[:0]),
        "inspect needs at least one input, but not one came: pass a few …",
    ),
    "generator": Refused(
        errors.DataError, on(iter([(X, Y)])), "data is passed over more than once, but a list_iterator can …: pass …"
    ),
    "number": Refused(
        errors.DataError, on(3), "data must be an iterable of (x, y) batches …, but it is a int: pass a DataLoader, …"
    ),
    "dataset": Refused(
        errors.DataError, on(TensorDataset(X, Y)), "data must be an iterable …, but it is a TensorDataset: pass …"
    ),
    "inputs alone": Refused(errors.DataError, on([X]), BATCH.format("a Tensor")),
    "one item": Refused(errors.DataError, on([[X]]), BATCH.format("a list of 1 items")),
    "dict without labels": Refused(
        errors.DataError, on([{"y": Y, "x": X}]), BATCH.format("a dict with the keys ['x', 'y']")
    ),
    "fewer targets": Refused(
        errors.DataError, reg(y=Y[:9]), ROWS + "the pair (X, Y) has inputs of shape [20, 3] and …: pass whole …"
    ),
    "one example": Refused(
        errors.DataError, on([(X[0], Y[0, 0])]), ROWS + "batch 0 has … [3] and targets of shape []: pass whole …"
    ),
    "shared mask": Refused(
        errors.DataError, on([((X, X[0]), Y)]), ROWS + "… of shape [20, 3], [3] and …: pass whole …, as a buffer"
    ),
    "fewer weights": Refused(
        errors.DataError, on([(X, Y, Y[:3, 0])]), ROWS + "…, and weights of shape [3]: pass whole batches …"
    ),
    "no targets": Refused(
        errors.DataError, on([(X, None)]), "targets must be one tensor …, but those of batch 0 are a NoneType …: …"
    ),
    "texts": Refused(
        errors.DataError, on([(np.array(["a"]), Y)]), "inputs must be one tensor …, but those … a ndarray …: convert …"
    ),
    "object": Refused(
        errors.DataError, reg(x=object()), "inputs must hold a tensor …, but those of the pair (X, Y) are a object …: …"
    ),
    "weights of two axes": Refused(errors.TargetError, on([(X, Y, Y.abs())]), WEIGHTS.format("[20, 1]", 0)),
    "negative weights": Refused(errors.TargetError, weighted(-1.0), WEIGHTS.format("[20]", 20)),
    "NaN weights": Refused(errors.TargetError, weighted(*[1.0] * 19, torch.nan), WEIGHTS.format("[20]", 1)),
    "no weight": Refused(
        errors.TargetError, weighted(0.0), "at least one target must count, but all 20 examples …: check both"
    ),
    "no label": Refused(
        errors.TargetError, cls(0 * K - 100), "at least one target must count, but all 20 examples …: check both"
    ),
    "flat targets of two": Refused(
        errors.ShapeError, reg(y=Y[:, 0], module=net(2)), SHAPE.format("regression", 2, "[20]")
    ),
    "two targets of one": Refused(errors.ShapeError, reg(y=X[:, :2]), SHAPE.format("regression", 1, "[20, 2]")),
    "one target of two": Refused(errors.ShapeError, reg(module=net(2)), SHAPE.format("regression", 2, "[20, 1]")),
    "flat targets to score": Refused(
        errors.ShapeError, lambda: regression().predict(X).log_prob(X), SHAPE.format("regression", 1, "[20, 3]")
    ),
    "fewer targets to score": Refused(
        errors.ShapeError,
        lambda: regression().predict(X).log_prob(Y[:3]),
        "log_prob needs a target for each of the 20 …, but …: pass …",
    ),
    "float labels": Refused(
        errors.TargetError, cls(K.double()), "class labels must be integers, but they are torch.float64: pass …"
    ),
    "bool labels": Refused(
        errors.TargetError, cls(K > 0), "class labels must be integers, but they are torch.bool: pass class …"
    ),
    "label too high": Refused(errors.TargetError, cls(K + 1), CLASSES.format(10, 2)),
    "label too low": Refused(errors.TargetError, cls(-K), CLASSES.format(10, -1)),
    "one output": Refused(errors.TargetError, cls(module=net()), "labels must lie in 0 … 0 …, but …: …ll.Bernoulli())"),
    "one-hot": Refused(errors.ShapeError, cls(F.one_hot(K)), LABELS.format("[n, 2]")),
    "labels of two axes": Refused(errors.ShapeError, cls(K[:, None]), LABELS.format("[n, 1]")),
    "no such class axis": Refused(
        errors.ShapeError, cls(likelihood=ll.Categorical(class_axis=2)), LABELS.format("[n]")
    ),
    "binary 2": Refused(
        errors.TargetError,
        cls(2 * K[:, None], net(), likelihood=ll.Bernoulli()),
        "binary targets must …, but … from 0 to 2: recode …",
    ),
    "binary shape": Refused(errors.ShapeError, cls(likelihood=ll.Bernoulli()), SHAPE.format("binary", 2, "[20]")),
    "negative counts": Refused(errors.TargetError, cls(-K[:, None], net(), likelihood=ll.Poisson()), COUNTS.format(10)),
    "halves": Refused(errors.TargetError, cls(K[:, None] / 2, net(), likelihood=ll.Poisson()), COUNTS.format(10)),
    "another size to score": Refused(
        errors.ShapeError,
        lambda: sized().log_prob(torch.zeros(2, 7).long()),
        "all outputs must have the shape [2, 5] …, but one …: pad …",
    ),
    "another size": Refused(
        errors.ShapeError,
        lambda: ll.fit(nn.Conv1d(1, 1, 1), [(torch.ones(4, 1, n), torch.ones(4, 1, n)) for n in (5, 7)], "regression"),
        "all outputs must have one shape, [1, 5] in the first batch, but those of batch 1 have [1, 7]: pad or crop …",
    ),
    "no data": Refused(errors.InputError, lambda: regression().predict(3), TAKES.format("int")),
}
