"""Networks that are refused."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import linlap as ll
from linlap import errors
from refusals import Does, Refused, X, Y, cls, does, frozen, in_batches, net, on, reg, set_at

PARAMS = 'params must be None, "weights", "last_layer" or a predicate …, but it is {}: choose one of these'
RANDOM = (
    "the network must return the same outputs for the same inputs in eval mode, but two evaluations differ by …: switch off "
    "what is random (functional dropout, sampling)"
)
DEPENDS = "the output for one example must not depend on the other rows of the batch, but …: give batch normalisation …"
NO_TENSOR = "the network must return a tensor, or an object or dict with `logits`, but it returned a {}: wrap it in a …"
NO_GRADIENT = (
    "the network's outputs must be differentiable in the weights that get a posterior, but …: take torch.no_grad, …"
)


KEEPS = "the network must be the module itself, but it is a {}, which keeps its weights to itself: pass …"

NETWORKS = {
    "no module": Refused(
        errors.InputError, reg(module=len), "net must be a torch.nn.Module, but it is a builtin_…: pass the network …"
    ),
    "frozen": Refused(
        errors.NothingToLearnError,
        reg(module=frozen()),
        "at least one weight …, but none of the 2 … (params=None): set requires_grad …",
    ),
    "no weights": Refused(
        errors.NothingToLearnError,
        lambda: ll.linearise(nn.ReLU()),
        "at least one weight must …, but none of the 0 …: …",
    ),
    "none chosen": Refused(
        errors.NothingToLearnError, reg(params=lambda n, p: n == "?"), "at least one weight …, but none …: …"
    ),
    "params": Refused(errors.InputError, reg(params="biases"), PARAMS.format("'biases'")),
    "params as names": Refused(errors.InputError, reg(params=["weight"]), PARAMS.format("['weight']")),
    "params twice": Refused(
        errors.InputError,
        reg(module=ll.linearise(net()), params="weights"),
        "the weights are chosen where …, but params='weights' …: pass …",
    ),
    "dropout": Refused(errors.RandomNetworkError, does(lambda f, x: F.dropout(f(x), 0.5)), RANDOM),
    "NumPy's noise": Refused(errors.RandomNetworkError, does(lambda f, x: f(x) * np.random.rand()), RANDOM),  # noqa: NPY002
    "Python's noise": Refused(errors.RandomNetworkError, does(lambda f, x: f(x) * random.random()), RANDOM),
    "noise to inspect": Refused(
        errors.RandomNetworkError, lambda: ll.inspect(Does(lambda f, x: F.dropout(f(x), 0.5)), X), RANDOM
    ),
    "batch norm": Refused(
        errors.BatchDependentError,
        reg(module=nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False).double(), net())),
        DEPENDS,
    ),
    "batch norm of images": Refused(
        errors.BatchDependentError,
        lambda: ll.fit(nn.BatchNorm2d(3, track_running_stats=False), (torch.rand(4, 3, 2, 2),) * 2, "regression"),
        DEPENDS,
    ),
    "centred": Refused(errors.BatchDependentError, does(lambda f, x: f(x - x.mean(0))), DEPENDS),
    "squeezed": Refused(
        errors.NetworkError,
        reg(y=X, module=Does(lambda f, x: f(x).squeeze(), 3)),
        "one example must give one row …, but it gave [3, 1] instead of [1, 3]: name the axis …, as in squeeze(-1)",
    ),
    "a loss": Refused(
        errors.NetworkError,
        does(lambda f, x: f(x).mean()),
        "the network must return one row for …, but 8 examples …: put the batch on …",
    ),
    "batch second": Refused(
        errors.NetworkError, does(lambda f, x: f(x).T), "the network must return one row …, but 8 … [1, 8]: put …"
    ),
    "a tuple": Refused(errors.NetworkError, does(lambda f, x: (f(x), x)), NO_TENSOR.format("tuple")),
    "a dict": Refused(errors.NetworkError, does(lambda f, x: {"out": f(x)}), NO_TENSOR.format("dict")),
    "None": Refused(
        errors.NetworkError, lambda: ll.linearise(Does(lambda f, x: None)).outputs(X), NO_TENSOR.format("NoneType")
    ),
    "detached": Refused(errors.NetworkError, does(lambda f, x: f(x).detach()), NO_GRADIENT),
    "no_grad": Refused(errors.NetworkError, does(lambda f, x: torch.no_grad()(f)(x)), NO_GRADIENT),
    "labels": Refused(errors.NetworkError, cls(module=Does(lambda f, x: f(x).argmax(1))), NO_GRADIENT),
    "data-parallel": Refused(errors.NetworkError, reg(module=nn.DataParallel(net())), KEEPS.format("DataParallel")),
    "lazy": Refused(
        errors.NetworkError,
        reg(module=nn.LazyLinear(1)),
        "every weight must have a shape, but some of the network's lazy layers …: call the network once …",
    ),
    "root at zero": Refused(
        errors.NotFiniteError,
        on(in_batches(set_at(X, (13,), 0.0)), Does(lambda f, x: (f(x) - f.bias).abs().sqrt())),
        "the network's derivatives must be finite, but those of 1 examples of batch 2 …: look for a root, …",
    ),
    "root at zero, predicted": Refused(
        errors.NotFiniteError,
        lambda: on((X, Y), Does(lambda f, x: (f(x) - f.bias).abs().sqrt()))().predict([X, 0 * X]).std,
        "the network's derivatives must be finite, but those of 20 examples of batch 1 …: look for a root, …",
    ),
    "overflow, predicted": Refused(
        errors.NotFiniteError,
        lambda: on((X, Y), Does(lambda f, x: f(x).exp()))().predict([X, 1e4 * X.abs()]),
        "the network's outputs must be finite, but 20 of the 20 rows of batch 1 are NaN or infinite: check …",
    ),
    "NaN weights": Refused(
        errors.NotFiniteError,
        reg(module=Does(lambda f, x: f(x) * torch.nan)),
        "the network's outputs must be finite, but 8 of the 8 rows of batch 0 are …: check the trained weights …",
    ),
    "NaN in the third batch": Refused(
        errors.NotFiniteError,
        on(in_batches(set_at(set_at(X.abs(), (13,), -9), (11,), -9)), Does(lambda f, x: (f(x) - f.bias).sqrt())),
        "the network's outputs must be finite, but 2 of the 5 rows of batch 2 are NaN or infinite: check the trained …",
    ),
}
