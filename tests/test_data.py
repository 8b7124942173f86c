"""Whatever the form in which the data come, and whatever the order of their rows, the posterior is the same."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import cases
import linlap as ll
from fitted import fit
from linlap.data import batches, census, collect
from linlap.errors import DataWarning

MLP, CLASSES = cases.CASES["mlp"], cases.CASES["mlp-classes"]
X, Y = MLP.make()[1:3]
CPU = torch.device("cpu")


@lru_cache
def reference(case: cases.Case) -> ll.Posterior:
    net, inputs, targets, likelihood = case.make()
    return fit(net, (inputs, targets), likelihood)


def same_posterior(post: ll.Posterior, case: cases.Case = MLP, inputs: Any = None) -> None:
    """Log evidence and noise equal to 1e-9, error bars at some inputs to 1e-8 of themselves."""
    wanted = reference(case)
    new = case.make()[1][:5]
    assert post.log_evidence == pytest.approx(wanted.log_evidence, abs=1e-9)
    assert post.examples == wanted.examples
    std = post.predict(new if inputs is None else inputs).epistemic_std
    assert_close(std.reshape(5, -1), wanted.predict(new).epistemic_std.reshape(5, -1), rtol=1e-8, atol=0)


# --- the forms of the batches


class Rows(IterableDataset):
    """Examples one by one, as a stream gives them."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


class Refilled:
    """Batches in one pair of tensors, which is filled again and again."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = torch.empty(8, 3).double(), torch.empty(8, 1).double()
        for a, b in zip(X.split(8), Y.split(8), strict=True):
            yield x.copy_(a), y.copy_(b)


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def in_batches(size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(size), Y.split(size), strict=True))


pairs, shuffled = TensorDataset(X, Y), torch.randperm(len(X), generator=torch.Generator().manual_seed(1))
FORMS: dict[str, Callable[[], Any]] = {
    "pair": lambda: (X, Y),
    "pair in a list": lambda: [X, Y],
    "pair with flat targets": lambda: (X, Y[:, 0]),
    "pair of arrays": lambda: (X.numpy(), Y.numpy()),
    "pair of read-only arrays": lambda: (read_only(X.numpy().copy()), read_only(Y.numpy().copy())),
    "pair of arrays backwards": lambda: (X.numpy()[::-1], Y.numpy()[::-1]),
    "pair in another order": lambda: (X[shuffled], Y[shuffled]),
    "pair with a gradient": lambda: (X.clone().requires_grad_(), Y),
    "one batch": lambda: [(X, Y)],
    "list of batches": lambda: in_batches(8),
    "tuple of batches": lambda: tuple(in_batches(8)),
    "two batches": lambda: in_batches(20),
    "two batches of arrays": lambda: [(x.numpy(), y.numpy()) for x, y in in_batches(20)],
    "batches as lists": lambda: [list(batch) for batch in in_batches(8)],
    "uneven last batch": lambda: in_batches(17),
    "an empty batch between": lambda: [(X[:9], Y[:9]), (X[:0], Y[:0]), (X[9:], Y[9:])],
    "one example a batch": lambda: in_batches(1),
    "loader": lambda: DataLoader(pairs, batch_size=8),
    "shuffled loader, uneven": lambda: DataLoader(pairs, batch_size=17, shuffle=True),
    "drop_last, nothing to drop": lambda: DataLoader(pairs, batch_size=8, drop_last=True),
    "stream": lambda: DataLoader(Rows(), batch_size=8),
    "tensors filled again": Refilled,
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_and_order_of_the_data_gives_the_same_posterior(form):
    same_posterior(fit(MLP.make()[0], FORMS[form](), "gaussian"))


def test_two_tensors_are_a_pair_and_two_pairs_are_batches():
    """A list of two is ambiguous but for the type of its second item, also where the shapes would fit either way."""
    x, y = torch.randn(2, 2, 3).double(), torch.randn(2, 2, 3).double()
    as_pair, as_batches = collect([x, y], CPU), collect([(x[0], x[1]), (y[0], y[1])], CPU)
    assert [batch.inputs.shape for batch in as_pair] == [(2, 2, 3)]
    assert [batch.inputs.shape for batch in as_batches] == [(4, 3)]
    assert torch.equal(as_batches[0].inputs, torch.cat([x[0], y[0]]))
    assert torch.equal(as_batches[0].targets, torch.cat([x[1], y[1]]))


def test_batches_of_other_forms_are_not_merged():
    """Names, shapes, types and what is no tensor must agree; the order of a dict's keys is that of its own batch."""
    one, y = {"a": X, "b": 2 * X}, Y
    others = [{"b": X, "a": X}, {"a": X, "c": X}, {"a": X, "b": X.float()}, {"a": X, "b": X[:, :1]}, one | {"flag": 1}]
    for other in others:
        first, second = collect([(one, y), (other, y)], CPU)
        assert list(first.inputs) == ["a", "b"]
        assert list(second.inputs) == list(other)
    assert len(collect([(one, y), ({"a": 3 * X, "b": X}, y)], CPU)) == 1


def test_merged_batches_remember_where_each_example_came_from():
    held = collect([(X[:3], Y[:3]), (X[:2], Y[:2]), (X[:600].repeat(20, 1), Y.repeat(20, 1)), (X, Y)], CPU)
    assert [len(batch) for batch in held] == [805, 40]
    assert held[0].rows(2, 6).origin.tolist() == [0, 1, 1, 2]
    assert held[1].origin.tolist() == [3] * 40


# --- the forms of the inputs and outputs


class Of(nn.Module):
    """The network of the case, on inputs or with outputs in another form."""

    def __init__(
        self, taken: Callable[..., Tensor] = lambda x: x, given: Callable[[Tensor], Any] = lambda o: o
    ) -> None:
        super().__init__()
        self.net, self.taken, self.given = MLP.make()[0], taken, given

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.given(self.net(self.taken(*arguments, **keywords)))


A, B = X[:, :1], X[:, 1:]
joined = Of(lambda a, b: torch.cat([a, b], 1))
nested = Of(lambda tree: torch.cat([tree["a"], *tree["others"]], 1))
parts = ({"a": A, "others": (B[:, :1], B[:, 1:])},)
few = ({"a": A[:5], "others": [B[:5, :1].numpy(), B[:5, 1:].numpy()]},)
INPUTS = {
    "tuple": (joined, [((A, B), Y)], (A[:5], B[:5])),
    "list": (joined, [([A, B], Y)], (A[:5], B[:5])),
    "pair of a tuple": (joined, ((A, B), Y), (A[:5], B[:5])),
    "dict with labels": (joined, [{"labels": Y, "a": A, "b": B}], {"a": A[:5], "b": B[:5]}),
    "dict of arrays": (joined, [{"a": A.numpy(), "b": B.numpy(), "labels": Y.numpy()}], {"b": B[:5], "a": A[:5]}),
    "dict as inputs": (joined, ({"a": A, "b": B}, Y), {"a": A[:5], "b": B[:5]}),
    "nested": (nested, [(parts, Y)], ({"a": A[:5], "others": (B[:5, :1], B[:5, 1:])},)),
    "nested pair": (nested, (parts, Y), ({"a": A[:5], "others": (B[:5, :1], B[:5, 1:])},)),
    "small batches of dicts": (
        joined,
        [{"a": a, "b": b, "labels": y} for a, b, y in zip(A.split(7), B.split(7), Y.split(7), strict=True)],
        [{"a": A[:3], "b": B[:3], "labels": Y[:3]}, {"a": A[3:5], "b": B[3:5], "labels": Y[3:5]}],
    ),
    "what is no tensor": (
        Of(lambda x, scale, name: scale * x / 2),
        [{"x": X, "scale": 2.0, "name": "any", "labels": Y}],
        {"x": X[:5], "scale": 2.0, "name": None},
    ),
}


@pytest.mark.parametrize("form", INPUTS)
def test_networks_with_other_inputs_give_the_same_posterior(form):
    net, data, new = INPUTS[form]
    same_posterior(fit(net, data, "gaussian"), inputs=new)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


OUTPUTS = {
    "object with logits": lambda o: Output(o, 2 * o),
    "namespace with logits": lambda o: SimpleNamespace(logits=o),
    "dict with logits": lambda o: {"hidden": 2 * o, "logits": o},
    "one number an example": lambda o: o.squeeze(-1),
    "squeezed whatever the batch": lambda o: o.squeeze(),
}


@pytest.mark.parametrize("form", OUTPUTS)
def test_networks_with_other_outputs_give_the_same_posterior(form):
    post = fit(Of(given=OUTPUTS[form]), (X, Y), "gaussian")
    same_posterior(post)
    assert_close(post.predict(X).mean.reshape(-1, 1), reference(MLP).predict(X).mean, rtol=1e-12, atol=0)


def test_integer_inputs_of_any_width():
    case = cases.CASES["embedding"]
    net, tokens, labels, _ = case.make()
    data = [(tokens[:13].int(), labels[:13]), (tokens[13:], labels[13:].int())]
    same_posterior(fit(net, data, "categorical"), case)


# --- two passes over the data


class Augmented(Dataset):
    """Other inputs at every pass."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + 0.1 * torch.randn(3).double(), Y[i]


class Growing:
    """More examples at every pass."""

    passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return iter(in_batches(10)[: self.passes + 1])


class Reweighted(Growing):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self.passes += 1
        return iter([(X, Y, torch.full((40,), float(self.passes)))])


REMEDY = "switch off augmentation and drop_last for this loader. The first pass was used"
OTHER = "yielded the same number of examples, but not the same ones: "


@pytest.mark.parametrize(
    ("data", "came"),
    [
        (lambda: DataLoader(Augmented(), batch_size=10), OTHER),
        (lambda: DataLoader(pairs, batch_size=17, shuffle=True, drop_last=True), OTHER),
        (Reweighted, OTHER),
        (Growing, "yielded 20 and 30 examples: "),
    ],
    ids=["augmented", "drop_last", "reweighted", "growing"],
)
def test_two_passes_that_differ_are_warned_about_with_the_remedy(data, came):
    with pytest.warns(DataWarning, match="two passes over the data must yield the same examples, but they ") as seen:
        post = fit(MLP.make()[0], data(), "gaussian")
    (message,) = (str(warning.message) for warning in seen)
    assert came in message
    assert message.endswith(REMEDY)
    assert message in post.notes


def test_a_loader_that_always_drops_its_last_batch_is_warned_about():
    """In a fixed order both passes lack the same rows, so that only the loader itself can tell."""
    with pytest.warns(DataWarning, match=r"drop_last"):
        fit(MLP.make()[0], DataLoader(pairs, batch_size=17, drop_last=True), "gaussian")


@pytest.mark.parametrize("n_data", [39, 4000])
def test_another_number_of_examples_than_announced_is_warned_about(n_data):
    wanted = f"n_data={n_data} examples, but it yielded 40: the posterior is that of the examples that came"
    with pytest.warns(DataWarning, match=wanted):
        post = fit(MLP.make()[0], (X, Y), "gaussian", n_data=n_data)
    assert wanted in post.notes[0]


def test_the_announced_number_of_examples_is_not_warned_about():
    assert not fit(MLP.make()[0], DataLoader(pairs, batch_size=7), "gaussian", n_data=40).notes


def test_the_checksum_knows_examples_but_not_their_order():
    weights = torch.arange(40.0)

    def of(*data: Any) -> Any:
        return census(batches([tuple(data)]))

    assert of(X, Y) == of(X[shuffled], Y[shuffled]) == census(batches(in_batches(3)))
    assert of(X, Y, weights) == of(X[shuffled], Y[shuffled], weights[shuffled])
    nudged = X.clone()
    nudged[7, 2] += 1e-15
    others = [(X[shuffled], Y), (X, Y[shuffled]), (X[:39], Y[:39]), (nudged, Y), (X, Y, weights), (X.float(), Y)]
    assert len({of(X, Y), *(of(*other) for other in others)}) == 1 + len(others)


# --- weights of the examples


@cases.every([MLP, CLASSES])
def test_whole_weights_are_repetitions(case):
    """A weight of k is k copies of the example, and one of 0 none, to 1e-9 in log evidence."""
    net, inputs, targets, likelihood = case.make()
    weights = torch.arange(len(inputs)) % 4
    weighted = fit(net, [(inputs, targets, weights)], likelihood)
    repeated = fit(net, (inputs.repeat_interleave(weights, 0), targets.repeat_interleave(weights, 0)), likelihood)
    assert weighted.log_evidence == pytest.approx(repeated.log_evidence, abs=1e-9)
    assert_close(weighted.predict(inputs).cov, repeated.predict(inputs).cov, rtol=1e-7, atol=1e-12)


def test_weights_of_one_are_no_weights():
    ones = [(x, y, np.ones(len(x))) for x, y in in_batches(9)]
    same_posterior(fit(MLP.make()[0], ones, "gaussian"))


# --- dense outputs: the class axis, places without a target, shapes


class Turned(nn.Module):
    """The outputs of a network for images, [n, K, h, w], with their axes in another order."""

    def __init__(self, net: nn.Module, *axes: int) -> None:
        super().__init__()
        self.net, self.axes = net, axes

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).permute(self.axes)


IMAGES = cases.CASES["image-classes"]


@pytest.mark.parametrize(
    ("axes", "given", "found"),
    [((0, 2, 3, 1), None, 3), ((0, 2, 1, 3), None, 2), ((0, 2, 3, 1), 3, 3), ((0, 2, 3, 1), -1, 3)],
)
def test_the_class_axis_is_deduced_or_named(axes, given, found):
    net, images, labels, _ = IMAGES.make()
    post = fit(Turned(net, *axes), (images, labels), ll.Categorical(class_axis=given))
    assert post.likelihood.class_axis == found
    assert post.log_evidence == pytest.approx(reference(IMAGES).log_evidence, abs=1e-9)
    pred, wanted = post.predict(images), reference(IMAGES).predict(images)
    assert_close(pred.epistemic_std, wanted.epistemic_std.permute(axes), rtol=1e-8, atol=0)
    assert_close(pred.probs(), wanted.probs().permute(axes), rtol=1e-8, atol=0)


def test_where_two_axes_could_hold_the_classes_it_is_the_first():
    """Sequences of K places with K classes: the targets fit both axes; another one has to be named."""
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(2, 9), nn.Unflatten(1, (3, 3))).double(), torch.randn(20, 2).double()
    labels = net(2 * inputs).argmax(1)
    first, named = (fit(net, (inputs, labels), ll.Categorical(class_axis=axis)) for axis in (None, 2))
    other = fit(nn.Sequential(net, Turned(nn.Identity(), 0, 2, 1)), (inputs, labels), "categorical")
    assert (first.likelihood.class_axis, named.likelihood.class_axis) == (1, 2)
    assert named.log_evidence == pytest.approx(other.log_evidence, abs=1e-9)
    for axis, post in ((1, first), (2, named)):
        sums = [post.predict(inputs).probs().sum(a) for a in (1, 2)]
        assert_close(sums[axis - 1], torch.ones(20, 3).double(), rtol=0, atol=1e-12)
        assert float((sums[2 - axis] - 1).abs().max()) > 0.1


@pytest.mark.parametrize("mark", [-100, 255, 1])
def test_places_without_a_target_do_not_count(mark):
    """Images of which no place counts can be left out; `ignore_index` may be any label, also a class of its own."""
    net, images, labels, _ = IMAGES.make()
    likelihood = ll.Categorical() if mark == -100 else ll.Categorical(ignore_index=mark)
    masked = labels.clone()
    masked[:3] = mark
    some, fewer = fit(net, (images, masked), likelihood), fit(net, (images[3:], labels[3:]), likelihood)
    assert some.log_evidence == pytest.approx(fewer.log_evidence, abs=1e-9)
    assert_close(some.predict(images).cov, fewer.predict(images).cov, rtol=1e-7, atol=1e-12)


@cases.every(cases.named("image", "image-classes"))
def test_dense_outputs_keep_their_shape(case):
    net, images, _, likelihood = case.make()
    shape = net(images).shape
    numbers = shape[1:].numel()
    for mean in ("network", "linear"):
        pred = reference(case).predict(images, mean=mean)
        assert {pred.mean.shape, pred.std.shape, pred.epistemic_std.shape} == {shape}
        assert pred.cov.shape == (len(images), numbers, numbers)
        assert pred.epistemic_score.shape == pred.log_prob(case.make()[2]).shape == (len(images),)
        assert pred.sample(2).shape == (2, *shape)
    dense = pred.interval(0.5)[0] if likelihood == "gaussian" else pred.probs()
    assert dense.shape == shape


def test_a_warning_is_not_needed_for_what_is_right():
    """A shuffled loader with workers' randomness of its own passes without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        post = ll.fit(MLP.make()[0], DataLoader(pairs, 8, shuffle=True), "regression", progress=False)
    assert not post.notes
