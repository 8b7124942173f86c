"""Networks of every kind, fitted and predicted with every structure and no option set."""

import warnings
from typing import Any

import pytest
import torch

import blocks_table
import linlap as ll
from linlap.curvature.kron import Kron
from linlap.curvature.sampled import Sampled
from linlap.errors import LinlapWarning
from linlap.tree import map_leaves
from zoo import ZOO

EXAMPLES = 16
SAMPLED = Sampled(Kron(), draws=4)
every_network = pytest.mark.parametrize("name", ZOO)

UNSEEN = {
    "ViT": {"token"},
    "Swin": {"table"},
    "GPT-2": {"words.weight"},
    "LSTM": {f"recurrent.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    "GRU": {f"recurrent.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    "weight norm": {f"{i}.parametrizations.weight.original{j}" for i in (0, 3) for j in (0, 1)},
    "spectral norm": {f"{i}.parametrizations.weight.original" for i in (0, 3)},
}
"""Weights that are sliced, parametrised, fused or tied in two ways: their blocks come from gradients of their own."""


def data_of(name: str) -> tuple[torch.nn.Module, list[Any], Any, str]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        entry = ZOO[name]
        net, inputs = entry.build(), entry.inputs(EXAMPLES)
        if name in ("U-Net", "GRU"):
            shape = (EXAMPLES, 1, 4, 4) if name == "U-Net" else (EXAMPLES, 1)
            return net, [(inputs, torch.randn(shape))], inputs, "regression"
        labels = torch.randint(0, entry.outputs, (EXAMPLES,))
        batch = inputs | {"labels": labels} if isinstance(inputs, dict) else (inputs, labels)
        return net, [batch], inputs, "classification"


@pytest.mark.parametrize(
    "curvature", ["auto", "dense", "dual", "kron", "diagonal", SAMPLED], ids=lambda c: getattr(c, "name", c)
)
@every_network
def test_it_fits_and_predicts(name, curvature):
    net, batches, inputs, likelihood = data_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LinlapWarning)
        post = ll.fit(net, batches, likelihood, curvature=curvature, progress=False)
    few = map_leaves(lambda t: t[:4], inputs)
    predicted = post.predict(few)
    assert predicted.cov.shape == (4, ZOO[name].outputs, ZOO[name].outputs)
    assert (predicted.cov.diagonal(dim1=1, dim2=2) > 0).all()
    torch.testing.assert_close(
        predicted.variance.flatten(1), predicted.cov.diagonal(dim1=1, dim2=2), rtol=1e-3, atol=1e-6
    )
    numbers = sum(p.numel() for p in net.parameters())
    assert numbers == len(post.optimum) == len(post.setting.prior.precision) == len(post.factor.effective_dimensions())
    assert post.log_evidence == post.log_evidence


@every_network
def test_inspection_tells_which_block_covers_which_weights(name):
    """The blocks of a fit, and none that is not known: what is not seen as a matrix is a dense or diagonal block."""
    net, _, inputs, _ = data_of(name)
    seen = {line.name: line.block for line in ll.inspect(net, inputs).weights}
    assert set(seen) == {n for n, _ in net.named_parameters()}
    for weight, parameter in net.named_parameters():
        matrix = parameter.ndim > 1 and parameter.shape[0] > 1 and parameter[0].numel() > 1
        if weight not in UNSEEN.get(name, set()) and matrix and "places" not in weight and "depthwise" not in weight:
            assert seen[weight] in ("kron", "table"), weight
    assert all(seen[weight] in ("dense", "diagonal") for weight in UNSEEN.get(name, set()))


def test_the_documented_blocks_are_those_of_today():
    assert blocks_table.DOCUMENT.read_text(encoding="utf-8") == blocks_table.table()
