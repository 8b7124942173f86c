"""Small instances of the networks people have, with random weights: each as its own package builds it.

Every entry is a builder, the inputs of a few examples, and which weights Kronecker curvature does not see as matrices.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Entry(NamedTuple):
    """A network and what it takes."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    outputs: int = 3


def images(n: int, channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(n, channels, size, size)


def tokens(n: int, length: int = 6) -> dict[str, Tensor]:
    mask = torch.ones(n, length)
    mask[::2, -2:] = 0
    return {"input_ids": torch.randint(0, 13, (n, length)), "attention_mask": mask}


# ---- residual networks -----------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions (ResNet-18), or three with a bottleneck (ResNet-50), and a way around them."""

    def __init__(self, into: int, out: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        width = out // 4 if bottleneck else out
        shapes = (
            [(into, width, 1), (width, width, 3), (width, out, 1)] if bottleneck else [(into, out, 3), (out, out, 3)]
        )
        strided = 1 if bottleneck else 0
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, stride if i == strided else 1, k // 2, bias=False) for i, (a, b, k) in enumerate(shapes)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in shapes)
        self.relu = nn.ReLU(inplace=True)
        self.around = (
            nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1 or into != out
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = self.around(x)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            x = x if i == len(self.convs) - 1 else self.relu(x)
        x += kept
        return self.relu(x)


def resnet(bottleneck: bool, widths: tuple[int, ...] = (8, 8), classes: int = 3) -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    blocks = [
        Residual(a, b, 1 + (i > 0), bottleneck) for i, (a, b) in enumerate(zip((8, *widths), widths, strict=False))
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


class Wide(nn.Module):
    """A pre-activation block of a WideResNet."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm2d(into), nn.BatchNorm2d(out)
        self.first, self.second = nn.Conv2d(into, out, 3, 1, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(into, out, 1, bias=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(x))
        return self.second(self.dropout(F.relu(self.two(self.first(x))))) + self.around(x)


class Dense(nn.Module):
    """A block of a DenseNet: every layer sees all before it."""

    def __init__(self, into: int, growth: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(into + i * growth) for i in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(into + i * growth, growth, 3, 1, 1, bias=False) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return x


class ConvNeXt(nn.Module):
    """Depthwise convolution, channels-last layer norm, two linear layers, a scale for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class MBConv(nn.Module):
    """A block of an EfficientNet: expansion, depthwise filters, squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.expand, self.one = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depthwise, self.two = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide)
        self.squeeze, self.excite = nn.Conv2d(wide, 2, 1), nn.Conv2d(2, wide, 1)
        self.project, self.three = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.two(self.depthwise(F.silu(self.one(self.expand(x)), inplace=True))), inplace=True)
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return x + self.three(self.project(y))


def convolutional(*body: nn.Module, width: int = 8, out: int | None = None) -> nn.Module:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out or width, 3)]
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), *body, *head)


class UNet(nn.Module):
    """Down, up, and across; an image comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.down = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 6, 3, 2, 1)
        self.norm, self.up = nn.GroupNorm(2, 6), nn.ConvTranspose2d(6, 4, 2, 2)
        self.skip, self.out = nn.Conv2d(4, 2, 1), nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.into(x), 0.2)
        y = self.up(F.leaky_relu(self.norm(self.down(x)), 0.2))
        y = y + F.interpolate(F.avg_pool2d(y, 2), scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(torch.cat([y, self.skip(x)], 1))


# ---- transformers ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One projection for queries, keys and values, as timm has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(y.transpose(1, 2).reshape(n, t, d))


class Layer(nn.Module):
    """A pre-norm layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.one(x), bias)
        return x + self.down(F.gelu(self.up(self.two(x))))


class ViT(nn.Module):
    """Patches, a class token, positions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 5, width))
        self.layers, self.norm, self.head = nn.ModuleList([Layer(width, 2)]), nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Swin(nn.Module):
    """Windows of a feature map as examples of their own, with a table of relative positions; a shifted second layer."""

    def __init__(self, width: int = 8, window: int = 2) -> None:
        super().__init__()
        self.window, self.patches = window, nn.Conv2d(3, width, 2, 2)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, 2))
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (grid[:, :, None] - grid[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        self.layers, self.norm = nn.ModuleList([Layer(width, 2), Layer(width, 2)]), nn.LayerNorm(width)
        self.merge, self.head = nn.Linear(4 * width, width, bias=False), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        for shift, layer in enumerate(self.layers):
            x = torch.roll(x, (-shift, -shift), (1, 2))
            n, h, w, d = x.shape
            s = self.window
            windows = x.view(n, h // s, s, w // s, s, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, d)
            bias = self.table[self.index.view(-1)].view(s * s, s * s, 2).permute(2, 0, 1).contiguous().unsqueeze(0)
            windows = layer(windows, bias)
            x = windows.view(n, h // s, w // s, s, s, d).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, d)
        x = torch.cat([x[:, a::2, b::2] for a in (0, 1) for b in (0, 1)], -1)
        return self.head(self.norm(self.merge(x)).mean((1, 2)))


class Bert(nn.Module):
    """Separate projections, post-norm, three tables, a pooler; it takes and returns dicts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(13, width, padding_idx=0), nn.Embedding(6, width)
        self.kinds, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.pool, self.classifier = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        n, t = input_ids.shape
        x = self.words(input_ids) + self.places(torch.arange(t, device=input_ids.device).expand(n, -1))
        x = self.norm(x + self.kinds(torch.zeros_like(input_ids)))
        q, k, v = (f(x).view(n, t, 2, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores + (1 - attention_mask[:, None, None].to(x.dtype)) * -1e4
        x = self.one(x + self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, -1)))
        x = self.two(x + self.down(F.gelu(self.up(x))))
        return {"logits": self.classifier(torch.tanh(self.pool(x[:, 0])))}


class Conv1D(nn.Module):
    """The linear layer of GPT-2: its weight lies transposed."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(into, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class GPT2(nn.Module):
    """Causal attention, and a head that is the table of words."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(13, width), nn.Embedding(6, width)
        self.one, self.two, self.last = (nn.LayerNorm(width) for _ in range(3))
        self.attend, self.project = Conv1D(3 * width, width), Conv1D(width, width)
        self.up, self.down = Conv1D(4 * width, width), Conv1D(width, 4 * width)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        n, t = input_ids.shape
        x = self.words(input_ids) + self.places(torch.arange(t, device=input_ids.device))
        q, k, v = (
            part.view(n, t, 2, -1).transpose(1, 2) for part in self.attend(self.one(x)).split(x.shape[-1], dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(n, t, -1))
        x = x + self.down(F.gelu(self.up(self.two(x)), approximate="tanh"))
        return {"logits": self.head(self.last(x)[:, -1])}


# ---- recurrent networks and others -----------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self, kind: type[nn.RNNBase], outputs: int) -> None:
        super().__init__()
        self.recurrent, self.head = kind(3, 5, batch_first=True), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Twice(nn.Module):
    """A layer used twice, and attention of torch's own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer, self.attention = nn.Linear(width, width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


def parametrised(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Conv2d(3, 4, 3, 2)), nn.ReLU(), nn.Flatten(), norm(nn.Linear(36, 3)))


ZOO: dict[str, Entry] = {
    "ResNet-18": Entry(partial(resnet, False), images),
    "ResNet-50": Entry(partial(resnet, True, (16, 16)), images),
    "WideResNet": Entry(lambda: convolutional(Wide(8, 12), nn.BatchNorm2d(12), nn.ReLU(), out=12), images),
    "DenseNet": Entry(lambda: convolutional(Dense(8, 4, 2), nn.BatchNorm2d(16), out=16), images),
    "ConvNeXt": Entry(lambda: convolutional(ConvNeXt(8)), images),
    "EfficientNet": Entry(lambda: convolutional(MBConv(8)), images),
    "U-Net": Entry(UNet, partial(images, size=4), 16),
    "ViT": Entry(ViT, images),
    "Swin": Entry(Swin, images),
    "BERT": Entry(Bert, tokens),
    "GPT-2": Entry(GPT2, lambda n: {"input_ids": tokens(n)["input_ids"]}, 13),
    "LSTM": Entry(lambda: Recurrent(nn.LSTM, 3), lambda n: torch.randn(n, 4, 3)),
    "GRU": Entry(lambda: Recurrent(nn.GRU, 1), lambda n: torch.randn(n, 4, 3), 1),
    "used twice, attention": Entry(Twice, lambda n: torch.randn(n, 4, 8)),
    "weight norm": Entry(lambda: parametrised(nn.utils.parametrizations.weight_norm), images),
    "spectral norm": Entry(lambda: parametrised(nn.utils.parametrizations.spectral_norm), images),
}
