"""The networks of the experiments: weight counts of the paper, and use under torch.func."""

import pytest
import torch
from torch.func import functional_call, jvp, vmap

from experiments import architectures
from experiments.architectures import CLASSIFIERS, build, count_weights

COUNTS = {
    "cnn": {"big": 46_024, "med": 29_354, "small": 14_714},
    "resnet": {"big": 45_576, "med": 26_874, "small": 14_814},
    "biased_resnet": {"big": 45_726, "med": 26_986, "small": 14_898},
    "pre_resnet": {"big": 45_576, "med": 26_874, "small": 14_814},
    "fixup_resnet": {"big": 45_288, "med": 26_662, "small": 14_658},
    "transformer": {"big": 45_900, "med": 27_090, "small": 15_520},
}


@pytest.mark.parametrize("size", ["big", "med", "small"])
@pytest.mark.parametrize("arch", CLASSIFIERS)
def test_counts_of_the_paper(arch, size):
    assert count_weights(build(arch, size)) == COUNTS[arch][size]


@pytest.mark.parametrize("arch", CLASSIFIERS)
def test_tiny_has_three_to_five_thousand_weights(arch):
    assert 3_000 <= count_weights(build(arch, "tiny")) <= 5_000


@pytest.mark.parametrize(
    ("net", "count"),
    [
        (architectures.toy_mlp(), 2_701),
        (architectures.toy_mlp_layernorm(), 2_701),
        (architectures.uci_mlp(8), 3_051),
        (architectures.uci_mlp_layernorm(8), 3_251),
    ],
)
def test_counts_of_the_mlps(net, count):
    assert count_weights(net) == count


def test_toy_mlp_has_2600_weights_without_biases():
    named = architectures.toy_mlp().named_parameters()
    assert sum(p.numel() for name, p in named if name.endswith("weight")) == 2_600


def example_inputs(arch: str, n: int = 3) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    if arch != "transformer":
        return (torch.randn(n, 1, 28, 28, generator=rng),)
    mask = torch.arange(12) < torch.tensor([12, 7, 9])[:, None]
    return torch.rand(n, 12, 3, generator=rng) * mask[..., None], mask


@pytest.mark.parametrize("arch", CLASSIFIERS)
def test_networks_work_under_torch_func(arch):
    torch.manual_seed(0)
    net = build(arch, "tiny").double().eval()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in example_inputs(arch))
    before = [x.clone() for x in inputs]
    # away from the initial values, whose zeros sit on kinks of ReLU
    weights = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in net.named_parameters()}
    tangent = {name: torch.randn_like(p) for name, p in weights.items()}

    out, directional = jvp(lambda w: functional_call(net, w, inputs), (weights,), (tangent,))
    single = vmap(lambda *x: functional_call(net, weights, tuple(t[None] for t in x))[0])(*inputs)
    step = 1e-7
    moved = functional_call(net, {name: w + step * tangent[name] for name, w in weights.items()}, inputs)

    torch.testing.assert_close(single, out)
    torch.testing.assert_close((moved - out) / step, directional, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


def test_transformer_takes_tuple_dict_and_ignores_padding_and_order():
    torch.manual_seed(0)
    net = build("transformer", "tiny").eval()
    points, mask = example_inputs("transformer")
    out = net(points, mask)
    shuffled = torch.randperm(points.shape[1])

    torch.testing.assert_close(net((points, mask)), out)
    torch.testing.assert_close(net({"points": points, "mask": mask}), out)
    torch.testing.assert_close(net(points), out)
    torch.testing.assert_close(net(points[:, shuffled], mask[:, shuffled]), out)
    torch.testing.assert_close(net(points[1:2, :7], mask[1:2, :7]), out[1:2])


def test_transformer_is_the_one_of_torch():
    """Same logits as ``nn.TransformerEncoderLayer`` with the same weights."""
    torch.manual_seed(0)
    net = build("transformer", "tiny").eval()
    points, mask = example_inputs("transformer")
    tokens = torch.cat([net.class_token.expand(len(points), 1, -1), net.embed(points)], dim=1)
    padding = torch.cat([torch.zeros(len(points), 1, dtype=torch.bool), ~mask], dim=1)
    for layer in (net.layer1, net.layer2):
        reference = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        names = {"attention.in_proj.": "self_attn.in_proj_", "attention.out_proj.": "self_attn.out_proj."}
        state = layer.state_dict()
        for ours, theirs in names.items():
            state = {name.replace(ours, theirs): value for name, value in state.items()}
        reference.load_state_dict(state)
        tokens = reference(tokens, src_key_padding_mask=padding)  # train mode, no dropout: not the fused path
    torch.testing.assert_close(net(points, mask), net.head(tokens[:, 0]))
