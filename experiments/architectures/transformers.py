"""The paper's Transformer for point clouds: linear embedding, class token, two encoder layers, dense layer.

The layers are those of ``nn.TransformerEncoderLayer`` (post-norm, ReLU, no dropout; same weights and
initialisation) with attention written out: the fused kernels of torch have no forward-mode derivative.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from experiments.architectures.parts import CLASSES

POINT = 3  # x, y, intensity
HEADS = 2

PointCloud = tuple[Tensor, Tensor] | Mapping[str, Tensor]


class Attention(nn.Module):
    """Multi-head self-attention; only the first ``queries`` tokens ask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj.weight)
        nn.init.zeros_(self.in_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, tokens: Tensor, penalty: Tensor, queries: int) -> Tensor:
        """``tokens [b, t, d]``, ``penalty [b, t]`` (0 or -inf a key) to ``[b, queries, d]``."""
        heads = self.in_proj(tokens).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-3, -2)
        query, key, value = heads.unbind(0)  # each [b, heads, t, d / heads]
        scores = query[..., :queries, :] @ key.mT / query.shape[-1] ** 0.5
        attended = (scores + penalty[:, None, None, :]).softmax(-1) @ value
        return self.out_proj(attended.transpose(-3, -2).flatten(-2))


class EncoderLayer(nn.Module):
    """``x <- norm(x + attention(x))``, ``x <- norm(x + feedforward(x))``, for the first ``queries`` of x."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm1 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, penalty: Tensor, queries: int) -> Tensor:
        x = self.norm1(tokens[:, :queries] + self.attention(tokens, penalty, queries))
        return self.norm2(x + self.linear2(self.linear1(x).relu()))


class Transformer(nn.Module):
    """Logits ``[b, 10]`` of point clouds: 45 900 / 27 090 / 15 520 weights.

    There is no positional encoding, so the order of the points is immaterial. Only the class token is read at
    the end, so the second layer computes that token alone: the same function, at a fraction of the cost.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Linear(POINT, width)
        self.class_token = nn.Parameter(0.02 * torch.randn(width))
        self.layer1 = EncoderLayer(width, hidden)
        self.layer2 = EncoderLayer(width, hidden)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, points: Tensor | PointCloud, mask: Tensor | None = None) -> Tensor:
        """``points [b, n, 3]``, ``mask [b, n]`` (true where a point is): two arguments, a tuple or a dict.

        Without a mask the points of intensity zero are taken for padding.
        """
        if isinstance(points, Mapping):
            points, mask = points["points"], points.get("mask")
        elif isinstance(points, (tuple, list)):
            points, mask = points
        lit = points[..., 2] > 0 if mask is None else mask > 0
        class_token = self.class_token.expand(len(points), 1, -1)
        tokens = torch.cat([class_token, self.embed(points)], dim=1)
        padding = nn.functional.pad(lit, (1, 0), value=True).logical_not()  # the class token is always seen
        penalty = torch.zeros_like(tokens[..., 0]).masked_fill(padding, -torch.inf)
        tokens = self.layer1(tokens, penalty, queries=tokens.shape[1])
        return self.head(self.layer2(tokens, penalty, queries=1)[:, 0])


def transformer(width: int, hidden: int) -> Transformer:
    """A :class:`Transformer` with embedding size ``width`` and feed-forward size ``hidden``."""
    return Transformer(width, hidden)
