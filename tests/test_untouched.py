"""The user's network, data, random states and global settings are bit for bit as before, also after an exception."""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import cases
import linlap as ll
from fitted import fit
from portraits import NETS, X, Y, bits, untouched


class Boom(Exception):
    """What a network or a loader may raise."""


# --- what is done to it


def loader() -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True)


def everything_of(pred: ll.Predictive) -> None:
    for _ in (
        pred.std,
        pred.cov,
        pred.joint_cov,
        pred.epistemic_rank,
        pred.sample(2),
        pred.interval(),
        pred.log_prob(Y),
    ):
        pass


def linearised(net: nn.Module) -> None:
    features = ll.linearise(net)
    ones = torch.ones(features.size, dtype=torch.float64)
    features.jvp(X, ones)
    features.vjp(X)[1](Y)
    features.jacobian(X)
    features.outputs_at(ones, X)
    features.pulled(X, Y.unsqueeze(1))


def streamed(net: nn.Module) -> ll.Posterior:
    """So many rows for so little memory that the network is differentiated anew at every sweep."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(384, d, generator=generator, dtype=torch.float64) for d in (3, 1))
    several = TensorDataset(x, x.sum(1, keepdim=True).sin() + 0.3 * noise)
    post = fit(net, DataLoader(several, 100, shuffle=True), "gaussian", memory="300KB", model="affine")
    assert post.curvature == "dense"
    return post


FITS = {
    "pair": lambda net: fit(net, (X, Y), "gaussian"),
    "loader": lambda net: fit(net, loader(), "gaussian"),
    "streamed": streamed,
    "dual": lambda net: fit(net, loader(), "gaussian", curvature="dual"),
    "layers": lambda net: fit(net, (X, Y), "gaussian", prior="layer"),
    "naive": lambda net: fit(net, (X, Y), "gaussian", evidence_at="trained"),
    "paper": lambda net: fit(net, (X, Y), "gaussian", solver=ll.PaperSolver(epochs=2), most_rounds=2),
    "some weights": lambda net: fit(net, (X, Y), "gaussian", params="last_layer"),
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("how", FITS)
def test_fit_changes_nothing(how, make):
    net = make()
    with untouched(net), quiet(how == "paper"):
        FITS[how](net)


def quiet(wanted: bool) -> Any:
    stack = ExitStack()
    if wanted:  # two epochs are too few, and it says so
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ll.errors.ConvergenceWarning)
    return stack


USES = {
    "predict": lambda net, post: everything_of(post.predict(X)),
    "linear mean": lambda net, post: everything_of(post.predict(X, mean="linear")),
    "predict a loader": lambda net, post: everything_of(post.predict(loader())),
    "sample": lambda net, post: post.sample(3),
    "inspect": lambda net, post: ll.inspect(net, X),
    "inspect a loader": lambda net, post: ll.inspect(net, loader(), prior="layer"),
    "linearise": lambda net, post: linearised(net),
    "evaluate": lambda net, post: ll.evaluate(post, (X, Y), unfamiliar=3 * X),
    "evaluate a loader": lambda net, post: ll.evaluate(post, loader()),
    "compare": lambda net, post: str(ll.compare({"one": post})),
    "print": lambda net, post: str(post),
}


@pytest.fixture(scope="module", params=NETS)
def fitted(request) -> tuple[nn.Module, ll.Posterior]:
    net = NETS[request.param]()
    return net, fit(net, (X, Y), "gaussian")


@pytest.mark.parametrize("how", USES)
def test_what_follows_a_fit_changes_nothing(how, fitted):
    with untouched(fitted[0]):
        USES[how](*fitted)


def test_saving_and_loading_change_nothing(fitted, tmp_path):
    net, post = fitted
    with untouched(net):
        ll.save(post, tmp_path / "posterior")
        ll.load(tmp_path / "posterior", net).predict(X)


@pytest.mark.parametrize(
    "case", cases.named("batch-norm", "transformer", "attention", "gru", "tied"), ids=lambda c: c.name
)
def test_networks_of_other_layers_are_not_changed(case):
    net, inputs, targets, likelihood = case.make()
    net.train()
    with untouched(net):
        post = fit(net, (inputs, targets), likelihood, curvature="dense")
        _ = post.predict(inputs).std, ll.inspect(net, inputs)


# --- exceptions


def at_call(number: int, raised: BaseException) -> tuple[Callable[[], None], list[int]]:
    """A guard that raises at that call of forward."""
    calls: list[int] = []

    def guard() -> None:
        calls.append(1)
        if len(calls) == number:
            raise raised

    return guard, calls


@pytest.mark.parametrize(
    ("make", "raised"), list(zip(NETS.values(), [Boom(), KeyboardInterrupt()], strict=True)), ids=["error", "interrupt"]
)
def test_nothing_changes_when_the_network_raises_at_any_call(make, raised):
    net = make()
    net.guard, calls = at_call(0, raised)
    streamed(net)
    assert len(calls) > 20
    for number in [1, 2, 3, 5, 8, 13, len(calls) // 2, len(calls)]:
        net.guard, _ = at_call(number, raised)
        with untouched(net), pytest.raises(type(raised)):
            streamed(net)


@pytest.mark.parametrize("how", ["predict", "linear mean", "predict a loader", "inspect", "linearise", "evaluate"])
def test_nothing_changes_when_the_network_raises_later(how, fitted):
    net, post = fitted
    guard = net.guard
    try:
        USES[how](net, post)  # the first time more is asked of the network: which derivatives it has
        net.guard, calls = at_call(0, Boom())
        USES[how](net, post)
        for number in {1, 2, len(calls) // 2, len(calls)} - {0}:
            net.guard, _ = at_call(number, Boom())
            with untouched(net), pytest.raises(Boom):
                USES[how](net, post)
    finally:
        net.guard = guard


class Broken:
    """A loader that draws random numbers, as one that shuffles does, and raises in the middle of a pass."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes -= 1
        for x, y in zip(X.split(8), Y.split(8), strict=True):
            random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002 (the state that may not change)
            yield x, y
            if self.passes == 0:
                raise Boom


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("passes", [1, 2])
def test_nothing_changes_when_the_loader_raises_in_the_middle(passes, make):
    net = make()
    with untouched(net), pytest.raises(Boom):
        fit(net, Broken(passes), "gaussian")


def test_nothing_changes_when_a_loader_to_predict_or_evaluate_raises(fitted):
    net, post = fitted
    for use in (post.predict, partial(ll.evaluate, post), partial(ll.inspect, net)):
        with (
            untouched(net),
            pytest.raises(Boom) if use.__class__ is not partial or use.args[0] is post else nullcontext(),
        ):
            use(Broken(1))


def test_nothing_changes_when_the_data_are_refused(fitted):
    net, post = fitted
    bad = X.clone()
    bad[2, 1] = torch.nan
    for use in (
        lambda: fit(net, [(X, Y), (bad, Y)], "gaussian"),
        lambda: post.predict(bad),
        lambda: ll.inspect(net, bad),
    ):
        with untouched(net), pytest.raises(ll.errors.DataError):
            use()


# --- what else a caller may have set


def unusual(stack: ExitStack) -> None:
    """Settings other than torch's own."""
    fastpath, dtype = torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype()
    flash, deterministic = torch.backends.cuda.flash_sdp_enabled(), torch.are_deterministic_algorithms_enabled()
    stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
    stack.callback(torch.set_default_dtype, dtype)
    stack.callback(torch.backends.cuda.enable_flash_sdp, flash)
    stack.callback(torch.use_deterministic_algorithms, deterministic)
    torch.backends.mha.set_fastpath_enabled(not fastpath)
    torch.set_default_dtype(torch.float64)
    torch.backends.cuda.enable_flash_sdp(not flash)
    torch.use_deterministic_algorithms(not deterministic)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "TF32 acceleration", UserWarning)  # torch says so whenever these are set
    stack.enter_context(torch.backends.mkldnn.flags(enabled=False, deterministic=True, allow_tf32=False))


CALLERS = {
    "unusual settings": unusual,
    "no gradients": lambda stack: stack.enter_context(torch.no_grad()),
    "inference mode": lambda stack: stack.enter_context(torch.inference_mode()),
    "mixed precision": lambda stack: stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("caller", CALLERS)
def test_the_callers_settings_neither_change_nor_matter(caller, make):
    """Log evidence and error bars are the same wherever fit and predict are called from, to 1e-10."""
    net = make()
    wanted = fit(net, (X, Y), "gaussian")
    with ExitStack() as stack:
        CALLERS[caller](stack)
        with untouched(net):
            post = fit(net, (X, Y), "gaussian")
            std = post.predict(X.clone()).epistemic_std.clone()
    assert post.log_evidence == pytest.approx(wanted.log_evidence, abs=1e-10)
    assert_close(std, wanted.predict(X).epistemic_std, rtol=1e-10, atol=0)


def test_single_precision_networks_are_not_linearised_in_the_callers_mixed_precision():
    net = cases.CASES["mlp"].make()[0].float()
    features, vector = ll.linearise(net), torch.ones(26)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = [features.jvp(X.float(), vector)[1], features.vjp(X.float())[1](Y.float()), features.jacobian(X.float())]
    wanted = [features.jvp(X.float(), vector)[1], features.vjp(X.float())[1](Y.float()), features.jacobian(X.float())]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# --- a forward that writes to its buffers and inputs


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_training_goes_on_as_if_nothing_had_happened(make):
    """One step of training gives the same bits with and without a fit before it; the network can still be copied."""
    plain, used = make(), make()
    fit(used, (X, Y), "gaussian")
    results = []
    copied = [copy.deepcopy(used)] if make is NETS["recurrent"] else []  # torch itself cannot copy old weight norm
    for net in (plain, used, *copied):
        torch.manual_seed(3)
        step = torch.optim.SGD(net.parameters(), lr=0.1)
        ((net(X) - Y) ** 2).mean().backward()
        step.step()
        results.append([bits(t) for t in [*net.state_dict().values(), *(p.grad for p in net.parameters())]])
    assert all(result == results[0] for result in results)


class Counting(nn.Module):
    """Its output depends on how often it was called, which it counts in place, also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def test_a_buffer_that_forward_changes_in_place_is_as_it_was_at_every_call():
    net = Counting().double()
    net(X)
    assert net.calls == 1
    post = fit(net, (X, Y), "gaussian")
    means = [post.predict(X).mean for _ in range(2)]
    features = ll.linearise(net)
    assert net.calls == 1
    assert torch.equal(*means)
    assert torch.equal(features.outputs(X), features.outputs(X))
    assert_close(means[0], 2 * net.layer(X).detach(), rtol=1e-12, atol=0)


class Doubling(nn.Module):
    """It doubles its inputs in place."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mul_(2))


@pytest.mark.parametrize("data", [lambda: (X, Y), lambda: [(X, Y)], loader], ids=["pair", "batch", "loader"])
def test_data_that_forward_changes_in_place_stay_as_they_were(data):
    """The posterior is that of a network which doubles a copy."""
    net = cases.CASES["mlp"].make()[0]
    inplace = Doubling(net)
    with untouched(inplace):
        post = fit(inplace, data(), "gaussian")
        std, jacobian = post.predict(X).std, ll.linearise(inplace).jacobian(X)
    wanted = fit(net, (2 * X, Y), "gaussian")
    assert post.log_evidence == pytest.approx(wanted.log_evidence, abs=1e-9)
    assert_close(std, wanted.predict(2 * X).std, rtol=1e-8, atol=0)
    assert_close(jacobian, ll.linearise(net).jacobian(2 * X), rtol=1e-12, atol=1e-14)


def test_the_network_and_data_may_change_after_the_fit():
    """The posterior holds its own copies of the weights and, where batches came, of the data."""
    net, data = cases.CASES["mlp"].make()[0], [(X.clone(), Y.clone())]
    post = fit(net, data, "gaussian", curvature="dual", memory="1MB")
    before = [post.predict(X).mean, post.predict(X).std, post.predict(X, mean="linear").mean]
    with torch.no_grad():
        for tensor in (*net.parameters(), *data[0]):
            tensor.zero_()
    after = [post.predict(X).mean, post.predict(X).std, post.predict(X, mean="linear").mean]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
