"""Networks as their own packages build them, small and random: fitted and predicted with no option set.

They run where the packages are: `make packages` installs transformers, timm and torchvision beside everything else.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linlap as ll
from linlap.errors import LinlapWarning

EXAMPLES, CLASSES = 8, 3
CURVATURES = ["auto", "kron"]

Made = tuple[nn.Module, Any]


def pixels(size: int = 32) -> Tensor:
    return torch.randn(EXAMPLES, 3, size, size)


def words() -> dict[str, Tensor]:
    mask = torch.ones(EXAMPLES, 6, dtype=torch.long)
    return {"input_ids": torch.randint(1, 50, (EXAMPLES, 6)), "attention_mask": mask}


def hugging_face(kind: str, task: str, inputs: Callable[[], Any], **options: Any) -> Callable[[], Made]:
    def build() -> Made:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, **options)
        return getattr(transformers, f"{kind}For{task}Classification")(config), inputs()

    return build


def of_torchvision(build: Callable[[Any], nn.Module]) -> Callable[[], Made]:
    return lambda: (build(pytest.importorskip("torchvision").models), pixels())


def of_timm(name: str, **options: Any) -> Callable[[], Made]:
    def build() -> Made:
        timm = pytest.importorskip("timm")
        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options), pixels()

    return build


def convnext(models: Any) -> nn.Module:
    blocks = [models.convnext.CNBlockConfig(8, 16, 1), models.convnext.CNBlockConfig(16, None, 1)]
    return models.ConvNeXt(blocks, num_classes=CLASSES)


def efficientnet(models: Any) -> nn.Module:
    blocks = [models.efficientnet.MBConvConfig(4, 3, 2, 8, 12, 2, 1.0, 1.0)]
    return models.EfficientNet(blocks, dropout=0.1, num_classes=CLASSES, last_channel=16)


def images(**more: int) -> dict[str, Any]:
    return {"pixel_values": pixels(), **more}


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NETWORKS: dict[str, Callable[[], Made]] = {
    "transformers BERT": hugging_face("Bert", "Sequence", words, vocab_size=50, **SMALL),
    "transformers GPT-2": hugging_face(
        "GPT2", "Sequence", words, vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, pad_token_id=0
    ),
    "transformers ViT": hugging_face("ViT", "Image", images, image_size=32, patch_size=16, **SMALL),
    "transformers Swin": hugging_face(
        "Swin",
        "Image",
        images,
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    "transformers ConvNeXt": hugging_face(
        "ConvNext", "Image", images, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]
    ),
    "transformers ResNet": hugging_face(
        "ResNet", "Image", images, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"
    ),
    "torchvision DenseNet": of_torchvision(lambda m: m.DenseNet(4, (2, 2), 8, num_classes=CLASSES)),
    "torchvision ConvNeXt": of_torchvision(convnext),
    "torchvision EfficientNet": of_torchvision(efficientnet),
    "torchvision ViT": of_torchvision(lambda m: m.VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=CLASSES)),
    "torchvision Swin": of_torchvision(
        lambda m: m.SwinTransformer([4, 4], 8, [1, 1], [2, 2], [4, 4], num_classes=CLASSES)
    ),
    "timm ResNet-18": of_timm("resnet18", channels=[8, 8, 16, 16]),
    "timm ResNet-50": of_timm("resnet50", channels=[4, 4, 8, 8]),
    "timm WideResNet": of_timm("wide_resnet50_2", channels=[4, 4, 8, 8]),
    "timm ViT": of_timm("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=2, num_heads=2),
    "timm ConvNeXt": of_timm("convnext_atto", dims=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
}


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_it_fits_and_predicts(name, curvature):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, inputs = NETWORKS[name]()
        labels = torch.randint(0, CLASSES, (EXAMPLES,))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    batch = {**inputs, "labels": labels} if isinstance(inputs, dict) else (inputs, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LinlapWarning)
        post = ll.fit(net, [batch], "classification", curvature=curvature, progress=False)
    predicted = post.predict(inputs)
    assert predicted.probs().shape == (EXAMPLES, CLASSES)
    assert (predicted.cov.diagonal(dim1=1, dim2=2) > 0).all()
    assert len(post.optimum) == sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    seen = ll.inspect(net, inputs).weights
    assert sum(torch.Size(line.shape).numel() for line in seen) == len(post.optimum)
