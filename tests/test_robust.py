"""Data and networks at the edge of what people have: offsets, units, dead units, inputs beside tensors, bad calls."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linlap as ll
from fitted import fit
from linlap.curvature.dual import Dual
from linlap.errors import EvidenceWarning
from linlap.network import last_layer
from linlap.problem import Streamed

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=GENERATOR, dtype=torch.float64)
Y = X[:, :1].sin() + 0.1 * torch.randn(40, 1, generator=GENERATOR, dtype=torch.float64)


def mlp(outputs: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


# --- offsets and units


@pytest.mark.parametrize("offset", [0.0, 1e5, 1e6])
@pytest.mark.parametrize("model", ["linear", "affine"])
def test_an_offset_of_the_targets_does_not_limit_the_noise(model, offset):
    """A pressure in pascals: the noise is that about the mean, however far from zero that is."""
    net = mlp()
    net[2].bias.data += offset
    post = fit(net, (X, Y + offset), "gaussian", model=model)
    assert 0.03 < post.noise < 0.3


def test_noise_levels_have_the_units_of_their_own_outputs():
    """The least noise of one output does not come from another's units."""
    net, both = mlp(2), torch.cat([0.1 * Y, 1e5 * Y], 1)
    net[2].weight.data *= torch.tensor([[0.1], [1e5]]).double()
    net[2].bias.data *= torch.tensor([0.1, 1e5]).double()
    found = fit(net, (X, both), ll.Gaussian(per_output=True), params=lambda name, _: "0" not in name).noise
    assert 3e-3 < float(found[0]) < 5e-2
    assert 3e3 < float(found[1]) < 1e5


# --- weights without curvature


def dead_units() -> nn.Sequential:
    """Half of the first layer never fires, and no layer has a bias other than zero."""
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    for layer in net[::2]:
        nn.init.zeros_(layer.bias)
    nn.init.constant_(net[2].bias, 0.5)
    net[0].bias.data[:] = -50.0
    return net


def zero_head() -> nn.Sequential:
    net = mlp()
    for p in net[2].parameters():
        nn.init.zeros_(p)
    return net


@pytest.mark.parametrize("prior", ["auto", "tensor"])
@pytest.mark.parametrize("made", [dead_units, zero_head])
def test_weights_without_curvature_keep_a_precision_that_can_be_used(made, prior):
    torch.manual_seed(0)
    net = made()
    post = fit(net, (X, Y), "gaussian", prior=prior)
    assert all(1e-100 < value < 1e100 for value in post.prior.values())
    assert torch.isfinite(post.predict(400 * X).std).all()
    assert all(torch.isfinite(draws).all() for draws in post.sample(2).values())


# --- inputs beside tensors, in files


class Flagged(nn.Module):
    """Takes a flag and a list beside its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, flag: object = None, pieces: object = None) -> Tensor:
        return self.net(x if flag is None else 2 * x) + (0.0 if pieces is None else pieces.copy()[0])


INPUTS = {
    "a dict with a flag": {"x": X, "flag": True},
    "None beside a tensor": (X, None),
    "a list within a dict": {"x": X, "flag": None, "pieces": [X[:, :1], 3.0]},
}


@pytest.mark.parametrize("form", INPUTS)
def test_what_is_no_tensor_comes_back_with_a_saved_posterior(form, tmp_path):
    net, inputs = Flagged(), INPUTS[form]
    post = fit(net, [(inputs, Y)], "gaussian", curvature=Dual(), memory=2_000)
    assert isinstance(post.factor.problem.sweeps, Streamed)
    ll.save(post, tmp_path / "post")
    assert torch.equal(ll.load(tmp_path / "post", net).predict(inputs).std, post.predict(inputs).std)


# --- loaders without labels


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(TensorDataset(X), 8),
        [{"x": X[:16]}, {"x": X[16:]}],
        [(X[:16],), (X[16:],)],
        [(X[:16].numpy(),), (X[16:].numpy(),)],
    ],
    ids=["loader", "dicts", "tuples of one", "arrays"],
)
def test_inputs_need_no_labels_to_be_predicted(data):
    post = fit(Flagged(), (X, Y), "gaussian")
    assert torch.allclose(post.predict(data).std, post.predict(X).std, rtol=1e-12, atol=0)
    assert "auroc epistemic" in ll.evaluate(post, (X, Y), unfamiliar=data).posterior


def test_inspection_counts_what_a_loader_holds():
    assert ll.inspect(mlp(), DataLoader(TensorDataset(X, Y), 8)).examples == 40
    assert ll.inspect(mlp(), [(X[:8], Y[:8]), (X[8:], Y[8:])]).examples == 40
    assert ll.inspect(mlp(), X[:8]).examples == 8


# --- a call that fails


def test_a_call_that_fails_leaves_the_next_ones_as_they_were():
    post = fit(mlp(), (X, Y), "gaussian", curvature="dense")
    before = post.predict(X, mean="linear").mean, post.predict(X).std
    for mean in ("linear", "network"):
        with pytest.raises(RuntimeError):
            _ = post.predict(X[:, :2], mean=mean).std
    assert post.linearised._forward_mode
    assert post.linearised._vectorises
    assert torch.equal(post.predict(X, mean="linear").mean, before[0])
    assert torch.equal(post.predict(X).std, before[1])


# --- the last layer


class Tied(nn.Module):
    """Its head is its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.table.weight


def normed(parametrised) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), parametrised(nn.Linear(4, 1)))


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (Tied(), {"table.weight", "head.bias"}),
        (
            normed(nn.utils.parametrizations.weight_norm),
            {"2.bias", "2.parametrizations.weight.original0", "2.parametrizations.weight.original1"},
        ),
        (normed(nn.utils.parametrizations.spectral_norm), {"2.bias", "2.parametrizations.weight.original"}),
        (mlp(), {"2.weight", "2.bias"}),
    ],
    ids=["tied", "weight norm", "spectral norm", "plain"],
)
def test_the_last_layer_is_whole(net, names):
    assert set(last_layer(net)) == names
    assert set(ll.linearise(net, "last_layer").network.weights) == names


# --- networks of several types


class Mixed(nn.Module):
    """One layer in float32, one in float64, as its author casts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.float()).tanh().double())


def test_a_network_of_two_types_is_linearised_as_it_is():
    torch.manual_seed(0)
    net = Mixed()
    post = fit(net, (X, Y), "gaussian", curvature="dense")
    assert post.status.converged or "float64" in post.status.message
    assert torch.equal(post.predict(X).mean, net(X).detach())
    assert {w.dtype for w in ll.linearise(net).network.weights.values()} == {torch.float64}


# --- counts


def test_counts_far_from_what_the_network_says_end_without_nan():
    counts = torch.poisson(torch.full((40, 1), 1e6).double(), generator=torch.Generator().manual_seed(0))
    with pytest.warns(EvidenceWarning):
        post = ll.fit(mlp(), (X, counts), ll.Poisson(), progress=False)
    assert abs(post.log_evidence) < 1e12
    assert all(torch.isfinite(w).all() for w in post.weights.values())
