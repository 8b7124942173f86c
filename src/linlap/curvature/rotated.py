"""Curvature that is diagonal in fixed orthogonal bases, one for each block of weights: everything in closed form.

H = Q diag(Σ_k τ_k s_k) Qᵀ with s_k the exact second moments of the gradients along the basis. The prior is a multiple of
the identity on each block, so that it is diagonal in the same basis; evidence, its derivatives and Σ cost no pass.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linlap.curvature.base import Curvature, Factor, Sensitivities, noise_levels
from linlap.curvature.blocks import Block, eigenbasis
from linlap.features import Linearised
from linlap.network import Layout
from linlap.prior import Prior
from linlap.problem import Problem
from linlap.tree import count, map_leaves
from linlap.uses.coverage import Coverage, Shape, Understood, understood
from linlap.uses.gradients import Gradients
from linlap.uses.outer import Outer, Term

PROBED_ROWS = 4
"""Examples on which the uses of the weights are certified."""

MOST_COLUMNS = 64
"""Columns of the root of W for which gradients are taken; where there are more, they are sampled."""

SAMPLED_COLUMNS = 16

Plan = Callable[[Shape, Understood | None], tuple[str, Shape]]
"""Shape of a weight as one row and how it is understood, to the kind of its block and its shape as matrices."""


# ---- passes over the data --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """Gradients of √W-weighted outputs on all training data, W at `outputs`."""

    problem: Problem
    outputs: Tensor
    coverage: Coverage

    def __call__(self) -> Iterator[tuple[Gradients, int, dict[str, Term]]]:
        """The gradients of one batch, the noise level of a column, and that column's terms."""
        levels, generator = noise_levels(self.problem), torch.Generator().manual_seed(0)
        start = 0
        for batch in self.problem.batches:
            step = max(1, self._rows(batch.inputs))
            for begin in range(0, len(batch), step):
                part = batch.rows(begin, begin + step)
                rows = slice(start + begin, start + begin + len(part))
                gradients = Gradients(self.problem.linearised, part.inputs, self.coverage)
                for r, terms in enumerate(gradients.columns(self._roots(rows, levels, generator))):
                    yield gradients, r % levels, terms
            start += len(batch)

    def _roots(self, rows: slice, levels: int, generator: torch.Generator) -> Tensor:
        """Lᵀ `[n, R, C]`, or random combinations E of its rows, with E EᵀE = I on average, where there are many."""
        identity = torch.eye(self.problem.outputs, dtype=torch.float64, device=self.outputs.device)
        columns = identity.expand(rows.stop - rows.start, -1, -1)
        root = self.problem.likelihood.root_transpose(self.outputs[rows], self.problem.targets.rows(rows), columns)
        if root.shape[1] <= MOST_COLUMNS or levels > 1:
            return root
        signs = torch.randint(0, 2, (len(root), SAMPLED_COLUMNS, root.shape[1]), generator=generator)
        return (2.0 * signs - 1).to(root) @ root / SAMPLED_COLUMNS**0.5

    def _rows(self, inputs: Any) -> int:
        """Examples whose forward pass and patches take a tenth of the memory."""
        return int(0.1 * self.problem.memory / (4 * self._numbers(inputs)))

    @cached_property
    def _each(self) -> dict[str, int]:
        return {}

    def _numbers(self, inputs: Any) -> int:
        """Numbers that one example needs: outputs of the watched operations, and what enters them."""
        if "numbers" not in self._each:
            one = Gradients(self.problem.linearised, map_leaves(lambda t: t[:1], inputs), self.coverage)
            terms = next(iter(one.columns(torch.ones_like(one.linearised.outputs(one.inputs)).unsqueeze(1))))
            sizes = [
                t.left.numel() + t.right.numel() if isinstance(t, Outer) else t.right.numel() for t in terms.values()
            ]
            self._each["numbers"] = 4 * sum(sizes) + 1
        return self._each["numbers"]


def build(problem: Problem, outputs: Tensor, plan: Plan) -> "RotatedCurvature":
    """Find the blocks, their bases and the second moments along them."""
    few = problem.batches[0].rows(0, PROBED_ROWS).inputs
    coverage = understood(problem.linearised, few)
    layout = problem.linearised.network.layout
    blocks = planned(layout, coverage, plan)
    passes = Passes(problem, outputs, coverage)
    based = with_bases(blocks, passes)
    return RotatedCurvature(problem, outputs, passes, tuple(based), moments(based, passes), plan)


def planned(layout: Layout, coverage: Coverage, plan: Plan) -> list[Block]:
    """A block for each weight, still without bases."""
    blocks = []
    for name, place in layout.slices.items():
        kind, shape = plan((1, 1, place.stop - place.start), coverage.weights.get(name))
        blocks.append(Block(name, place, shape, kind))
    return blocks


def with_bases(blocks: Sequence[Block], passes: Passes) -> list[Block]:
    """Eigenvectors of the second moments of either side."""
    wanted = {b.name: b for b in blocks if b.kind != "diagonal"}
    if not wanted:
        return list(blocks)
    sums: dict[str, list[Tensor | None]] = {name: [None, None] for name in wanted}
    for _, _, terms in passes():
        for name, block in wanted.items():
            left, right = block.seen(terms[name]).moments()
            if block.kind == "dense":
                left = left[:, :0, :0]
            for i, moment in enumerate((left, right)):
                before = sums[name][i]
                sums[name][i] = moment if before is None else before + moment
    return [replace(b, **_bases(*sums[b.name])) if b.name in wanted else b for b in blocks]


def _bases(left: Tensor | None, right: Tensor | None) -> dict[str, Tensor | None]:
    """Bases of the sides that have more than one direction."""
    sides = {"left": left, "right": right}
    return {s: None if m is None or m.shape[-1] < 2 else eigenbasis(m)[0] for s, m in sides.items()}


def moments(blocks: Sequence[Block], passes: Passes) -> Tensor:
    """s_k `[K, P]`: squares of the gradients along the bases, summed over examples and columns."""
    problem = passes.problem
    total = torch.zeros(noise_levels(problem), problem.weights, dtype=torch.float64, device=passes.outputs.device)
    for gradients, level, terms in passes():
        for block in blocks:
            own = gradients.turned(block.name, block.seen(terms[block.name]), block.left, block.right)
            total[level, block.place] += own.squares().flatten()
    return total


# ---- the curvature and its factor ------------------------------------------------------------------------


@dataclass(frozen=True)
class RotatedCurvature(Curvature):
    """Bases and moments."""

    problem: Problem
    outputs: Tensor
    passes: Passes
    blocks: tuple[Block, ...]
    along: Tensor
    plan: Plan
    exact = False

    def diagonal(self) -> Tensor:
        """Diagonals of Q diag(s_k) Qᵀ; their sums over a block are exact."""
        return torch.stack([torch.cat([b.spread(level[b.place]) for b in self.blocks]) for level in self.along])

    def factor(self, prior: Prior, noise_precision: Tensor) -> "RotatedFactor":
        """Nothing to factorise."""
        own = self._apart(prior)
        return RotatedFactor(own.blocks, own.along, self.passes.coverage, prior, noise_precision)

    def at(self, outputs: Tensor) -> "RotatedCurvature":
        """Build it anew."""
        return build(self.problem, outputs, self.plan)

    def _apart(self, prior: Prior) -> "RotatedCurvature":
        """The same with bases that leave apart what the prior does not treat alike."""
        mixing = [b for b in self.blocks if _mixes(b, prior)]
        if not mixing:
            return self
        key = tuple(b.name for b in mixing)
        if key not in self._kept:
            narrowed = [_narrowed(b, prior) if b in mixing else b for b in self.blocks]
            self._kept[key] = replace(self, blocks=tuple(narrowed), along=moments(narrowed, self.passes))
        return self._kept[key]

    @cached_property
    def _kept(self) -> dict[tuple[str, ...], "RotatedCurvature"]:
        return {}


def _mixes(block: Block, prior: Prior) -> bool:
    """Does a basis mix weights of different precisions?"""
    own = block.matrices(prior.precision)
    uneven = [block.left is not None and bool((own != own[:, :1]).any()), False]
    uneven[1] = block.right is not None and bool((own != own[:, :, :1]).any())
    return any(uneven)


def _narrowed(block: Block, prior: Prior) -> Block:
    """Without the bases that mix."""
    own = block.matrices(prior.precision)
    left = None if bool((own != own[:, :1]).any()) else block.left
    right = None if bool((own != own[:, :, :1]).any()) else block.right
    return replace(block, left=left, right=right)


class RotatedFactor(Factor):
    """H + Λ = Q diag(h + Λ) Qᵀ, h = Σ_k τ_k s_k."""

    def __init__(
        self, blocks: Sequence[Block], along: Tensor, coverage: Coverage, prior: Prior, noise_precision: Tensor
    ) -> None:
        self.blocks, self.along, self.coverage = tuple(blocks), along, coverage
        self.prior, self.noise_precision = prior, noise_precision

    @cached_property
    def bends(self) -> Tensor:
        """The h `[P]`."""
        return self.noise_precision @ self.along

    @cached_property
    def total(self) -> Tensor:
        """The h + Λ `[P]`."""
        return self.bends + self.prior.precision

    @property
    def log_determinant(self) -> float:
        """Σ log(1 + h/Λ)."""
        return float((self.bends / self.prior.precision).log1p().sum())

    def sensitivities(self) -> Sensitivities:
        """With e = h/(h + Λ) and ρ_k = τ_k s_k/(h + Λ): −Σe, −Σρ_k and their derivatives, e(1 − e), ρ_k(1 − e), ρ_kρ_l."""
        prior, kept = self.prior, self.bends / self.total
        shares = self.noise_precision.unsqueeze(1) * self.along / self.total
        across = prior.sum(shares * (1 - kept)).mT
        corner = shares @ shares.mT - torch.diag(shares.sum(1))
        corner = -corner
        hessian = torch.cat(
            [torch.cat([torch.diag(prior.sum(kept * (1 - kept))), across], 1), torch.cat([across.mT, corner], 1)]
        )
        return Sensitivities(torch.cat([-prior.sum(kept), -shares.sum(1)]), hessian)

    def effective_dimensions(self) -> Tensor:
        """The diagonal of Q diag(e) Qᵀ."""
        kept = self.bends / self.total
        return torch.cat([b.spread(kept[b.place]) for b in self.blocks])

    def _rotate(self, rows: Tensor) -> Tensor:
        return torch.cat([b.rotate(rows) for b in self.blocks], 1)

    def _back(self, coordinates: Tensor) -> Tensor:
        return torch.cat([b.back(coordinates[:, b.place]) for b in self.blocks], 1)

    def solve(self, vectors: Tensor) -> Tensor:
        """Q (h + Λ)⁻¹ Qᵀ."""
        columns = vectors.reshape(len(vectors), -1).double()
        return self._back(self._rotate(columns.mT) / self.total).mT.reshape(vectors.shape)

    def whiten(self, rows: Tensor) -> Tensor:
        """Rows Q (h + Λ)⁻½."""
        return self._rotate(rows.double()) * self.total.rsqrt()

    def sample(self, draws: int, generator: torch.Generator) -> Tensor:
        """Q (h + Λ)⁻½ ε."""
        noise = torch.randn(draws, len(self.total), dtype=torch.float64, device=generator.device, generator=generator)
        return self._back(noise.to(self.total.device) * self.total.rsqrt())

    def numbers(self, outputs: int) -> int:
        """Without rows of the Jacobian: the largest block's gradients."""
        return outputs * max(b.size for b in self.blocks)

    def variance_of(self, linearised: Linearised, inputs: Any) -> Tensor:
        """One backward pass an output, and a weighted sum of squares in each block."""
        columns = []
        for gradients, terms in self._columns(linearised, inputs):
            each = [
                gradients.turned(b.name, b.seen(terms[b.name]), b.left, b.right).quadratic(self._weight(b))
                for b in self.blocks
            ]
            columns.append(torch.stack(each).double().sum(0))
        return torch.stack(columns, 1)

    def covariance_of(self, linearised: Linearised, inputs: Any) -> Tensor:
        """All outputs' gradients of one block after another."""
        turned: list[dict[str, Term]] = []
        for gradients, terms in self._columns(linearised, inputs):
            turned.append(
                {b.name: gradients.turned(b.name, b.seen(terms[b.name]), b.left, b.right) for b in self.blocks}
            )
        total = torch.zeros(count(inputs), len(turned), len(turned), dtype=torch.float64, device=self.total.device)
        for block in self.blocks:
            total += _cross([terms[block.name] for terms in turned], self._weight(block))
        return total

    def _columns(self, linearised: Linearised, inputs: Any) -> Iterator[tuple[Gradients, dict[str, Term]]]:
        """The gradients of one output after another."""
        gradients = Gradients(linearised, inputs, self.coverage)
        n, outputs = count(inputs), linearised.outputs(inputs).shape[1]
        identity = torch.eye(outputs, dtype=linearised.network.dtype, device=self.total.device)
        for terms in gradients.columns(identity.expand(n, -1, -1)):
            yield gradients, terms

    def _weight(self, block: Block) -> Tensor:
        """1/(h + Λ) of a block `[G, L, R]`."""
        return 1 / block.matrices(self.total)

    def tensors(self) -> dict[str, Tensor]:
        """Moments and bases, with a description of the blocks."""
        described = {
            "blocks": [[b.name, b.place.start, b.place.stop, b.shape, b.kind] for b in self.blocks],
            "coverage": {k: [u.shape, u.places, u.tokens] for k, u in self.coverage.weights.items()},
        }
        tensors = {
            "along": self.along,
            "described": torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8),
        }
        for number, block in enumerate(self.blocks):
            for side, basis in (("left", block.left), ("right", block.right)):
                if basis is not None:
                    tensors[f"{number}.{side}"] = basis
        return tensors


def restored(tensors: dict[str, Tensor], prior: Prior, noise_precision: Tensor) -> RotatedFactor:
    """The factor whose `tensors` were saved."""
    described = json.loads(bytes(tensors["described"].tolist()))
    blocks = [
        Block(name, slice(start, stop), tuple(shape), kind, tensors.get(f"{i}.left"), tensors.get(f"{i}.right"))
        for i, (name, start, stop, shape, kind) in enumerate(described["blocks"])
    ]
    coverage = Coverage({k: Understood(tuple(s), tuple(p), t) for k, (s, p, t) in described["coverage"].items()})
    return RotatedFactor(blocks, tensors["along"], coverage, prior, noise_precision)


def _cross(columns: list[Term], weight: Tensor) -> Tensor:
    """Σ weight·g_c·g_d of each example `[n, C, C]` for gradients g_c."""
    parts = [torch.cat([part for _, part in term.gradients()]).flatten(1) for term in columns]
    together = torch.stack(parts, 1).double()
    return (together * weight.flatten()) @ together.mT
