"""Saved posteriors load bit for bit, and nothing in them is executed."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import nn

import cases
import linlap as ll
from fitted import fit, fit_case
from linlap import store
from linlap.curvature.dense import Dense
from linlap.curvature.dual import Dual
from linlap.errors import InputError
from linlap.likelihood import Likelihood
from linlap.problem import Stored, Streamed

BOTH = pytest.mark.parametrize("curvature", ["dense", "dual"])
ONE_EACH = cases.every(cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image-classes"))

fitted = lru_cache(fit_case)


def loaded(post: ll.Posterior, net: nn.Module, folder: Path, **options) -> ll.Posterior:
    ll.save(post, folder / "post.safetensors")
    return ll.load(folder / "post.safetensors", net, **options)


def assert_same(one: ll.Posterior, other: ll.Posterior, X: object) -> None:
    """Every prediction and every number, bit for bit."""
    for mean in ("network", "linear"):
        first, second = (post.predict(X, mean=mean) for post in (one, other))
        for name in ("mean", "variance", "cov", "joint_cov", "std", "epistemic_rank", "reference"):
            assert torch.equal(getattr(first, name), getattr(second, name)), name
        assert torch.equal(first.sample(2), second.sample(2))
        assert (first.noise_std is None) == (second.noise_std is None)
        assert first.noise_std is None or torch.equal(first.noise_std, second.noise_std)
    for a, b in ((one.weights, other.weights), (one.sample(2), other.sample(2))):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    for name in (
        *(
            "prior",
            "groups",
            "effective_dimensions",
            "log_evidence",
            "log_evidence_error",
            "history",
            "status",
            "notes",
        ),
        *("model", "evidence_at", "curvature", "examples", "output_shape", "calibration", "seed"),
    ):
        assert getattr(one, name) == getattr(other, name), name
    assert str(one) == str(other)
    assert torch.equal(one.setting.z, other.setting.z)
    assert one.setting.prior.structure == other.setting.prior.structure
    assert one.setting.prior.pull == other.setting.prior.pull
    assert (
        torch.equal(torch.as_tensor(one.noise or 0.0), torch.as_tensor(other.noise or 0.0)) or one.noise is other.noise
    )


# --- what is saved comes back


@BOTH
@ONE_EACH
def test_a_posterior_comes_back_bit_for_bit(case, curvature, tmp_path):
    net, X, _, _ = case.make()
    post = fitted(case, curvature=curvature)
    assert_same(loaded(post, net, tmp_path), post, X[:4])


@ONE_EACH
def test_the_dual_form_keeps_the_features_or_else_the_inputs(case, tmp_path):
    """J where it is held in memory; where it is not, the inputs, and the network is differentiated again."""
    net, X, Y, likelihood = case.make()
    held = fitted(case, curvature="dual")
    features = 8 * held.examples * held.output_shape.numel() * held.linearised.size
    streamed = fit(net, (X, Y), likelihood, curvature=Dual(), memory=3 * features)  # a quarter is for features
    for post, kind, words in (
        (held, Stored, "the features of the training data"),
        (streamed, Streamed, "the training inputs"),
    ):
        assert isinstance(post.factor.problem.sweeps, kind)
        assert words in ll.save(post, tmp_path / "post")
        again = ll.load(tmp_path / "post", net)
        assert isinstance(again.factor.problem.sweeps, kind)
        assert_same(again, post, X[:4])


@pytest.mark.parametrize(
    "options",
    [
        {"model": "affine"},
        {"evidence_at": "trained"},
        {"params": "last_layer"},
        {"prior": "hyper"},
        {"prior": "tensor", "seed": 3},
        {"prior": "channel"},
    ],
    ids=str,
)
def test_whatever_was_chosen_comes_back(options, tmp_path):
    net, X, _, _ = cases.CASES["mlp-two-outputs"].make()
    post = fitted(cases.CASES["mlp-two-outputs"], **options)
    assert_same(loaded(post, net, tmp_path), post, X[:4])


@pytest.mark.parametrize(
    "likelihood",
    [
        ll.Gaussian(per_output=True),
        ll.Gaussian(noise=0.5),
        ll.Gaussian(noise=torch.tensor([0.4, 0.6])),
        ll.Gaussian(noise=torch.tensor([0.4, 0.6]).numpy()),  # pyright: ignore
    ],
    ids=["learnt for each", "one number", "a tensor", "an array"],
)
def test_every_noise_comes_back(likelihood, tmp_path):
    net, X, Y, _ = cases.CASES["mlp-two-outputs"].make()
    post = fit(net, (X, Y), likelihood)
    again = loaded(post, net, tmp_path)
    assert torch.equal(again.predict(X).noise_std, post.predict(X).noise_std)
    assert torch.equal(again.predict(X).log_prob(Y), post.predict(X).log_prob(Y))
    assert torch.equal(torch.as_tensor(again.noise), torch.as_tensor(post.noise))
    assert again.setting.learns_noise == post.setting.learns_noise == (likelihood.noise is None)


def test_a_classifiers_marks_come_back(tmp_path):
    net, X, Y, _ = cases.CASES["image-classes"].make()
    Y[:, 0] = 7
    post = fit(net, (X, Y), ll.Categorical(class_axis=1, ignore_index=7))
    again = loaded(post, net, tmp_path)
    assert again.likelihood == post.likelihood
    assert torch.equal(again.predict(X).log_prob(Y), post.predict(X).log_prob(Y))


@cases.every(cases.named("mlp", "mlp-classes"))
def test_held_out_scales_come_back(case, tmp_path):
    net, X, Y, likelihood = case.make()
    post = fit(
        net, (X[:20], Y[:20]), likelihood, held_out=(X.repeat(2, 1), Y.roll(1, 0).repeat(2, *[1] * (Y.ndim - 1)))
    )
    assert post.calibration != fitted(case).calibration
    assert_same(loaded(post, net, tmp_path), post, X[:4])


@BOTH
def test_a_network_in_half_precision_comes_back(curvature, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(torch.bfloat16)
    X = torch.randn(30, 3).to(torch.bfloat16)
    post = fit(net, (X, X.float().sum(1, keepdim=True).sin()), "gaussian", curvature=curvature)
    assert_same(loaded(post, net, tmp_path), post, X[:4])


def test_nested_inputs_come_back(tmp_path):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1).double()

        def forward(self, left, pair):
            return self.layer(left * pair[0]) + pair[1]

    torch.manual_seed(0)
    left, right = torch.randn(2, 20, 3, dtype=torch.float64)
    inputs, net = {"left": left, "pair": (right, right[:, :1])}, Both()
    post = fit(net, [(inputs, left[:, :1].sin())], "gaussian", curvature=Dual(), memory=2_000)
    assert isinstance(post.factor.problem.sweeps, Streamed)
    assert_same(loaded(post, net, tmp_path), post, inputs)


@cases.every(cases.named("batch-norm", "tied", "lstm"))
def test_buffers_tied_weights_and_recurrent_layers_come_back(case, tmp_path):
    net, X, _, _ = case.make()
    assert_same(loaded(fitted(case), net.train(), tmp_path), fitted(case), X[:4])
    assert net.training


def test_a_loaded_posterior_can_be_saved_again(tmp_path):
    net, X, _, _ = cases.CASES["mlp"].make()
    post = fitted(cases.CASES["mlp"], curvature="dual")
    once = loaded(post, net, tmp_path)
    assert_same(loaded(once, net, tmp_path), post, X)


class Own(Dense):
    name = "own"


def test_a_structure_of_ones_own_is_passed_to_load(tmp_path):
    net, X, _, _ = cases.CASES["mlp"].make()
    post = fit_case(cases.CASES["mlp"], curvature=Own())
    assert "the own curvature" in ll.save(post, tmp_path / "post")
    assert_same(ll.load(tmp_path / "post", net, curvature=Own()), post, X)
    with pytest.raises(
        InputError, match=r"structure of the curvature is 'own', but it is not known: pass that one as curv"
    ):
        ll.load(tmp_path / "post", net)
    with pytest.raises(InputError, match=r"structure of the curvature is 'own', but 'dense' was given: pass that one"):
        ll.load(tmp_path / "post", net, curvature=Dense())


def test_saving_says_what_was_kept_and_its_size(tmp_path):
    said = ll.save(fitted(cases.CASES["mlp"], curvature="dense"), tmp_path / "post.safetensors")
    size = (tmp_path / "post.safetensors").stat().st_size / 2**20
    assert said == f"saved the dense curvature and θ⋆: {size:.1f} MiB in post.safetensors"


# --- nothing is executed


def test_nothing_in_the_library_unpickles_or_evaluates():
    """No import of a pickler, no torch.load or torch.save, no eval or exec."""
    forbidden = re.compile(
        r"^(pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve)\b|^torch\.(load|save)$|^(eval|exec)$"
    )
    found = []
    for path in Path(ll.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Call):
                names = [ast.unparse(node.func)]
            found += [f"{path.name}: {name}" for name in names if forbidden.search(name)]
    assert found == []


def test_every_likelihood_can_be_read_back():
    """A new one must be known to files too."""
    names = {type(made()).__name__ for made in store.LIKELIHOODS.values()}
    public = {n for n in ll.__all__ if isinstance(getattr(ll, n), type) and issubclass(getattr(ll, n), Likelihood)}
    assert names == public
