"""Kronecker and diagonal curvature: exact where they should be, right beside the dense one, for every network there is."""

import pytest
import torch
from torch import Tensor, nn

import cases
import linlap as ll
from fitted import close, fit, fit_case
from linlap import prior as priors
from linlap.curvature.base import Structure
from linlap.curvature.blocks import covered
from linlap.curvature.dense import Dense
from linlap.curvature.diagonal import Diagonal
from linlap.curvature.kron import Kron
from linlap.problem import Problem, pose
from test_uses import NETWORKS, made

STRUCTURES = [Diagonal(), Kron()]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.name)
every_network = pytest.mark.parametrize("name", NETWORKS)
UNIT = torch.ones(1, dtype=torch.float64)


def posed(net: nn.Module, x: Tensor) -> Problem:
    linearised = ll.linearise(net)
    labels = torch.arange(len(x)) % linearised.outputs(x).shape[1]
    return pose(linearised, [(x, labels)], ll.Categorical(), "linear", 2**20)


def prior_of(problem: Problem, structure: str = "curvature") -> priors.Prior:
    diagonal = Dense().of(problem, problem.network_outputs).diagonal().sum(0)
    return priors.build(structure, problem.linearised.network.layout, [], diagonal, problem.trained, 1.0)


@every_structure
def test_the_conformance_suite(structure):
    assert len(ll.testing.check_curvature(structure)) == 5 * len(ll.testing.CHECKS)


@every_network
def test_the_diagonal_is_exact(name):
    problem = posed(*made(name))
    got = Diagonal().of(problem, problem.network_outputs).diagonal()
    close(got, Dense().of(problem, problem.network_outputs).diagonal(), 1e-10)


@cases.every(list(cases.CASES.values()))
def test_the_diagonal_is_exact_for_every_likelihood(case):
    post = fit_case(case, curvature="dense")
    dense = post.factor
    problem = pose(ll.linearise(case.make()[0]), tuple(case.make()[1:3]), post.likelihood, "linear", 2**24)
    exact = torch.einsum("k,kij->ij", dense.noise_precision, dense.sums).diagonal()
    own = dense.noise_precision @ Diagonal().of(problem, problem.network_outputs).diagonal()
    close(own, exact, 1e-8)


@every_network
def test_traces_of_kronecker_blocks_are_exact(name):
    """So that the default prior is the same under every structure."""
    problem = posed(*made(name))
    exact = Dense().of(problem, problem.network_outputs).diagonal()[0]
    curvature = Kron().of(problem, problem.network_outputs)
    for block in curvature.blocks:
        close(curvature.diagonal()[0][block.place].sum(), exact[block.place].sum(), 1e-8)
    assert sum(covered(curvature.blocks).values()) == problem.weights


def test_kronecker_blocks_are_those_of_the_exact_curvature_on_deep_linear_networks():
    """With the Gaussian likelihood and without shared weights H's blocks are Kronecker products themselves."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False), nn.Linear(3, 2, bias=False)]
    x, net = torch.randn(30, 4).double(), nn.Sequential(*layers).double()
    problem = pose(ll.linearise(net), (x, torch.randn(30, 2).double()), ll.Gaussian(noise=1.0), "linear", 2**20)
    exact = Dense().of(problem, problem.network_outputs).sums[0]
    curvature, prior = Kron().of(problem, problem.network_outputs), prior_of(problem, "single")
    own = torch.linalg.inv(curvature.factor(prior, UNIT).dense()) - torch.diag(prior.precision)
    for block in curvature.blocks:
        assert block.kind == "kron"
        close(own[block.place, block.place], exact[block.place, block.place], 1e-8)


def test_what_is_no_matrix_has_its_exact_block():
    """Norms, offsets and depthwise filters: dense blocks of the exact curvature, up to the groups of a convolution."""
    problem = posed(*made("convolutions"))
    exact = Dense().of(problem, problem.network_outputs).sums[0]
    curvature, prior = Kron().of(problem, problem.network_outputs), prior_of(problem)
    own = torch.linalg.inv(curvature.factor(prior, UNIT).dense()) - torch.diag(prior.precision)
    dense = [block for block in curvature.blocks if block.kind == "dense"]
    assert len(dense) == 8
    for block in dense:
        close(own[block.place, block.place], exact[block.place, block.place], 1e-6)


@every_structure
@every_network
def test_predictions_take_no_jacobian_and_are_those_of_the_covariance(name, structure: Structure):
    net, x = made(name)
    problem = posed(net, x)
    factor = structure.of(problem, problem.network_outputs).factor(prior_of(problem), UNIT)
    jacobian = problem.linearised.jacobian(x)
    close(factor.variance_of(problem.linearised, x), factor.variance(jacobian), 1e-10)
    close(factor.covariance_of(problem.linearised, x), factor.covariance(jacobian), 1e-10)


@every_structure
def test_a_prior_that_differs_within_a_block_is_left_apart(structure):
    """A precision for each output channel: the basis no longer mixes the channels, and Σ⁻¹ − Λ is positive."""
    net, x = made("convolutions")
    problem = posed(net, x)
    layout = problem.linearised.network.layout
    diagonal = structure.of(problem, problem.network_outputs).diagonal().sum(0)
    prior = priors.build("channel", layout, [("0.weight", "0.bias")], diagonal, problem.trained, 1.0)
    prior = prior.at(prior.log_precision + torch.linspace(-1, 1, len(prior.log_precision)).double())
    factor = structure.of(problem, problem.network_outputs).factor(prior, UNIT)
    h = torch.linalg.inv(factor.dense()) - torch.diag(prior.precision)
    close(h, h.mT, 1e-6)
    assert torch.linalg.eigvalsh(0.5 * (h + h.mT)).min() > -1e-8 * h.diagonal().max()
    close(h.diagonal().sum(), diagonal.sum(), 1e-6)


@every_structure
@cases.every(list(cases.CASES.values()))
def test_every_network_fits_and_its_evidence_is_a_lower_bound(case, structure):
    """log det of H's blocks is no less than that of H; F never rises; the same weights in H, Λ and θ."""
    exact, post = fit_case(case, curvature="dense"), fit_case(case, curvature=structure.name, most_rounds=200)
    assert post.status.converged, post.status
    falls = [b - a <= 1e-8 * max(1, abs(a)) for a, b in zip(post.history, post.history[1:], strict=False)]
    assert all(falls)
    assert post.history[-1] >= exact.history[-1] - 1e-6
    total = sum(block.size for block in post.factor.blocks)
    assert (
        total == len(post.optimum) == len(post.setting.prior.precision) == sum(w.numel() for w in post.weights.values())
    )


@every_structure
def test_many_outputs_are_sampled(structure):
    """More columns than are taken one by one: the curvature is right on average, its trace to some percent."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 80)).double(), torch.randn(200, 3).double()
    problem = posed(net, x)
    got = structure.of(problem, problem.network_outputs).diagonal().sum()
    wanted = Dense().of(problem, problem.network_outputs).diagonal().sum()
    assert 0.8 < float(got / wanted) < 1.25


@pytest.mark.parametrize("curvature", ["kron", "diagonal"])
def test_a_saved_posterior_comes_back(curvature, tmp_path):
    for case in cases.named("batch-norm", "transformer", "embedding"):
        net, x, *_ = case.make()
        post = fit_case(case, curvature=curvature)
        ll.save(post, tmp_path / "post")
        again = ll.load(tmp_path / "post", net)
        assert torch.equal(again.predict(x).cov, post.predict(x).cov)
        assert torch.equal(again.predict(x).variance, post.predict(x).variance)


def test_kronecker_factors_are_chosen_where_exact_structures_do_not_fit():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 10)), torch.randn(1000, 50)
    post = ll.fit(net, (x, torch.arange(1000) % 10), "classification", memory="64MiB", progress=False)
    assert post.curvature == "kron"
    assert torch.isfinite(post.predict(x[:5]).probs()).all()


def test_the_same_fit_twice_is_the_same():
    case = cases.CASES["mlp-classes"]
    one, two = (fit_case(case, curvature="kron") for _ in range(2))
    assert one.log_evidence == two.log_evidence
    assert torch.equal(one.predict(case.make()[1]).cov, two.predict(case.make()[1]).cov)


def test_half_precision_networks_fit():
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    for dtype in (torch.bfloat16, torch.float16):
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        post = fit(net, (x.to(dtype), x[:, :1].sin()), "gaussian", curvature="kron")
        assert post.predict(x[:4].to(dtype)).mean.dtype == dtype
        assert torch.isfinite(post.predict(x[:4].to(dtype)).std).all()


@every_network
def test_inspection_names_the_blocks_that_a_fit_uses(name):
    net, x = made(name)
    labels = torch.arange(len(x)) % ll.linearise(net).outputs(x).shape[1]
    post = fit(net, (x, labels), "categorical", curvature="kron")
    assert {line.name: line.block for line in ll.inspect(net, x).weights} == {
        b.name: b.kind for b in post.factor.blocks
    }
    assert any("lower bound" in note for note in post.notes)


# --- many outputs


class Scaled(nn.Module):
    """Its outputs are a scale's, an offset's and a linear layer's, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.shift = nn.Linear(4, 3), nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale + self.shift


HEADS = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "one output": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)),
    "scale and offset": Scaled,
}


@every_structure
@pytest.mark.parametrize("head", HEADS)
def test_heads_need_no_backward_pass(head, structure):
    """What gives the outputs themselves has variances in closed form; what only looks like it has not."""
    torch.manual_seed(0)
    net, x = HEADS[head]().double(), torch.randn(12, 4).double()
    linearised = ll.linearise(net)
    problem = pose(linearised, (x, linearised.outputs(x) + 1), ll.Gaussian(noise=1.0), "linear", 2**20)
    factor = structure.of(problem, problem.network_outputs).factor(prior_of(problem), UNIT)
    jacobian = linearised.jacobian(x)
    close(factor.variance_of(linearised, x), factor.variance(jacobian), 1e-10)
    close(factor.covariance_of(linearised, x), factor.covariance(jacobian), 1e-10)


@pytest.mark.parametrize("outputs", [1_000, 30_000])
def test_a_last_layer_of_many_outputs(outputs):
    """Never φ ⊗ I: neither a Jacobian nor a matrix of outputs × outputs beyond the basis of a side."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, outputs))
    x = torch.randn(24, 5)
    post = fit(net, (x, torch.randint(0, outputs, (24,))), "categorical", params="last_layer", memory="1GiB")
    assert post.curvature == "kron"
    assert set(post.weights) == {"2.weight", "2.bias"}
    predicted = post.predict(x[:8])
    assert predicted.variance.shape == (8, outputs)
    assert (predicted.variance > 0).all()
    torch.testing.assert_close(predicted.probs().sum(1), torch.ones(8), rtol=1e-4, atol=1e-4)
