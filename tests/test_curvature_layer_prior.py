"""The group g-prior by module: one λ, and each module's mean curvature for a scale."""

import pytest
import torch
from torch import nn

import linlap as ll


@pytest.fixture
def trained():
    torch.manual_seed(0)
    x = torch.randn(20, 2, dtype=torch.float64)
    return (
        nn.Sequential(nn.Linear(2, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)).double(),
        x,
        x[:, :1].sin(),
    )


def test_a_group_is_a_module_cut_where_only_a_part_of_it_is_normalised(trained):
    net, x, y = trained
    post = ll.fit(net, (x, y), "regression", prior="curvature-layer", progress=False)
    assert post.groups == {
        "0": ["0.weight", "0.bias"],
        "1": ["1.weight", "1.bias"],
        "3": ["3.weight", "3.bias"],
    }
    weighted = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 6)), nn.Linear(6, 1)).double()
    cut = ll.fit(weighted, (x, y), "regression", prior="curvature-layer", progress=False)
    direction = "0.parametrizations.weight.original1"
    assert [names for names in cut.groups.values() if direction in names] == [[direction]]


def test_precisions_are_one_number_times_the_mean_curvature(trained):
    net, x, y = trained
    post = ll.fit(net, (x, y), "regression", prior="curvature-layer", progress=False)
    squares = ll.linearise(net).jacobian(x).square().sum((0, 1))
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    by_name = dict(zip(sizes, squares.split(list(sizes.values())), strict=True))
    ratios = [
        precision / float(torch.cat([by_name[n] for n in post.groups[group]]).mean())
        for group, precision in post.prior.items()
    ]
    assert ratios == pytest.approx([ratios[0]] * 3, rel=1e-9)


def test_the_scale_of_normalised_weights_changes_nothing(trained):
    net, x, y = trained
    before = ll.fit(net, (x, y), "regression", prior="curvature-layer", progress=False)
    variance = before.predict(x).variance
    with torch.no_grad():
        for weight in net[0].parameters():
            weight.mul_(4)
    net[1].eps *= 16
    after = ll.fit(net, (x, y), "regression", prior="curvature-layer", progress=False)
    assert after.log_evidence == pytest.approx(before.log_evidence, rel=1e-9)
    torch.testing.assert_close(after.predict(x).variance, variance, rtol=1e-8, atol=0)
