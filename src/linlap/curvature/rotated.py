"""Curvature that is diagonal in fixed orthogonal bases, one for each block of weights: everything in closed form.

H = Q diag(Σ_k τ_k s_k) Qᵀ with s_k the exact second moments of the gradients along the basis. The prior is a multiple of
the identity on each block, so that it is diagonal in the same basis; evidence, its derivatives and Σ cost no pass.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linlap.curvature.base import Curvature, Factor, Restored, Sensitivities, Structure, noise_levels
from linlap.curvature.blocks import Block, eigenbasis
from linlap.features import Linearised
from linlap.network import Layout
from linlap.prior import Prior
from linlap.problem import Problem
from linlap.uses.coverage import Coverage, Shape, Understood, understood
from linlap.uses.gradients import Gradients
from linlap.uses.outer import Outer, Side, Term

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
    numbers: int

    def __call__(self) -> Iterator[tuple[Gradients, int, dict[str, Term]]]:
        """The gradients of one batch, the noise level of a column, and that column's terms."""
        levels, generator = noise_levels(self.problem), torch.Generator().manual_seed(0)
        start = 0
        for batch in self.problem.batches:
            for begin in range(0, len(batch), self.rows_at_once):
                part = batch.rows(begin, begin + self.rows_at_once)
                rows = slice(start + begin, start + begin + len(part))
                gradients = Gradients(self.problem.linearised, part.inputs, self.coverage)
                for r, terms in enumerate(gradients.columns(self._roots(rows, levels, generator))):
                    yield gradients, r % levels, terms
            start += len(batch)

    def _roots(self, rows: slice, levels: int, generator: torch.Generator) -> Tensor:
        """Lᵀ `[n, R, C]`, or random combinations E of its rows, with E EᵀE = I on average, where there are many."""
        n, c = rows.stop - rows.start, self.problem.outputs
        outputs, targets, likelihood = self.outputs[rows], self.problem.targets.rows(rows), self.problem.likelihood
        if c <= MOST_COLUMNS or levels > 1:
            identity = torch.eye(c, dtype=torch.float64, device=outputs.device).expand(n, -1, -1)
            return likelihood.root_transpose(outputs, targets, identity)
        signs = 2.0 * torch.randint(0, 2, (n, c, SAMPLED_COLUMNS), generator=generator) - 1
        return likelihood.mixed(outputs, targets, signs.to(outputs)).mT / SAMPLED_COLUMNS**0.5

    @property
    def rows_at_once(self) -> int:
        """Examples whose forward pass and patches take a tenth of the memory."""
        return max(1, int(0.1 * self.problem.memory / (4 * self.numbers)))


def numbers_of(problem: Problem, coverage: Coverage) -> int:
    """Numbers that one example needs: outputs of the watched operations, what enters them, and as much in other bases."""
    one = Gradients(problem.linearised, problem.batches[0].rows(0, 1).inputs, coverage)
    terms = next(one.columns(torch.ones_like(one.outputs).unsqueeze(1)))
    sides = [t.left.numel() + t.right.numel() if isinstance(t, Outer) else t.right.numel() for t in terms.values()]
    return 4 * sum(sides) + 1


def build(problem: Problem, outputs: Tensor, plan: Plan) -> "RotatedCurvature":
    """Find the blocks, their bases and the second moments along them."""
    few = problem.batches[0].rows(0, PROBED_ROWS).inputs
    coverage = understood(problem.linearised, few)
    layout = problem.linearised.network.layout
    blocks = planned(layout, coverage, plan)
    passes = Passes(problem, outputs, coverage, numbers_of(problem, coverage))
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
    """Eigenvectors of the second moments of either side, in the network's own precision."""
    wanted: list[tuple[Block, Side]] = [(block, side) for block in blocks for side in block.sides]
    if not wanted:
        return list(blocks)
    sums: dict[tuple[str, Side], Tensor] = {}
    last: dict[tuple[str, Side], Tensor] = {}
    for _, _, terms in passes():
        for block, side in wanted:
            key: tuple[str, Side] = (block.name, side)
            term = block.seen(terms[block.name])
            rows = term.side(side)
            if key in last and last[key].data_ptr() == rows.data_ptr():
                continue  # what enters a weight is the same for every column
            last[key], moment = rows, term.moment(side)
            sums[key] = sums[key].add_(moment) if key in sums else moment
    found = {block.name: block for block in blocks}
    dtype = passes.problem.linearised.network.dtype
    for block, side in wanted:
        basis = eigenbasis(sums.pop((block.name, side))).to(dtype)
        found[block.name] = replace(found[block.name], **{side: basis})
    return list(found.values())


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
    note = "the log evidence is a lower bound: the curvature is that of blocks of weights"

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
        return self.colour(noise.to(self.total.device))

    def colour(self, coordinates: Tensor) -> Tensor:
        """Q (h + Λ)⁻½·coordinates `[m, P]`: the transpose of `whiten`."""
        return self._back(coordinates * self.total.rsqrt())

    def numbers(self, outputs: int) -> int:
        """Without rows of the Jacobian: the largest block's gradients."""
        return outputs * max(b.size for b in self.blocks)

    def variance_of(self, linearised: Linearised, inputs: Any) -> Tensor:
        """One backward pass an output, and a weighted sum of squares in each block; none for what is the output itself."""
        gradients = Gradients(linearised, inputs, self.coverage)
        heads = {name: side for name, side in gradients.heads.items() if self._is_head(name)}
        total = gradients.outputs.new_zeros(gradients.outputs.shape, dtype=torch.float64)
        for name, side in heads.items():
            along, basis = self._head(name, side)
            total += (along if basis is None else along @ basis.square().mT).double()
        rest = [b for b in self.blocks if b.name not in heads]
        for c, terms in enumerate(self._columns(gradients) if rest else ()):
            for b in rest:
                own = gradients.turned(b.name, b.seen(terms[b.name]), b.left, b.right)
                total[:, c] += own.quadratic(self._weight(b)).double()
        return total

    def covariance_of(self, linearised: Linearised, inputs: Any) -> Tensor:
        """All outputs' gradients of one block after another."""
        gradients = Gradients(linearised, inputs, self.coverage)
        heads = {name: side for name, side in gradients.heads.items() if self._is_head(name)}
        n, c = gradients.outputs.shape
        total = torch.zeros(n, c, c, dtype=torch.float64, device=self.total.device)
        for name, side in heads.items():
            along, basis = self._head(name, side)
            own = torch.diag_embed(along) if basis is None else basis * along.unsqueeze(1) @ basis.mT
            total += own.double()
        rest = [b for b in self.blocks if b.name not in heads]
        turned = [
            {b.name: gradients.turned(b.name, b.seen(terms[b.name]), b.left, b.right) for b in rest}
            for terms in (self._columns(gradients) if rest else ())
        ]
        for block in rest:
            total += _cross([terms[block.name] for terms in turned], self._weight(block))
        return total

    def _is_head(self, name: str) -> bool:
        """Is the block one whose left side, or only side, is the network's output?"""
        return next(b for b in self.blocks if b.name == name).kind in ("kron", "dense", "diagonal")

    def _head(self, name: str, entering: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Variances `[n, C]` along a basis `[C, C]` of the outputs (None: their own), for a weight whose outputs those are.

        With o = Uz, and φ in its own basis, they are Σ_j φ_j²/(h + Λ)_ij; for an offset 1/(h + Λ)_i.
        """
        block = next(b for b in self.blocks if b.name == name)
        weight = self._weight(block)[0]
        if entering is None:
            basis, along = block.right, weight.flatten().unsqueeze(0)
        else:
            turned = entering if block.right is None else entering @ block.right[0].to(entering.dtype)
            basis, along = block.left, turned.square() @ weight.to(entering).mT
        return along, None if basis is None else basis[0].to(along.dtype)

    def _columns(self, gradients: Gradients) -> Iterator[dict[str, Term]]:
        """The gradients of one output after another."""
        n, c = gradients.outputs.shape
        identity = torch.eye(c, dtype=gradients.outputs.dtype, device=gradients.outputs.device)
        return gradients.columns(identity.expand(n, -1, -1))

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


class Rotated(Structure):
    """Structures that say no more than which block each weight gets."""

    @abstractmethod
    def plan(self, row: Shape, seen: Understood | None) -> tuple[str, Shape]:
        """The kind of a weight's block and its shape as matrices, from its shape as one row and how it is understood."""

    def of(self, problem: Problem, outputs: Tensor) -> RotatedCurvature:
        """A pass for the bases, where there are any, and one for the moments along them."""
        return build(problem, outputs, self.plan)

    def restored(self, tensors: dict[str, Tensor], linearised: Linearised, setting: Restored) -> RotatedFactor:  # noqa: ARG002
        """From moments and bases."""
        described = json.loads(bytes(tensors["described"].tolist()))
        blocks = [
            Block(name, slice(start, stop), tuple(shape), kind, tensors.get(f"{i}.left"), tensors.get(f"{i}.right"))
            for i, (name, start, stop, shape, kind) in enumerate(described["blocks"])
        ]
        seen = {k: Understood(tuple(s), tuple(p), t) for k, (s, p, t) in described["coverage"].items()}
        return RotatedFactor(blocks, tensors["along"], Coverage(seen), setting.prior, setting.noise_precision)


def _cross(columns: list[Term], weight: Tensor) -> Tensor:
    """Σ weight·g_c·g_d of each example `[n, C, C]` for gradients g_c."""
    parts = [torch.cat([part for _, part in term.gradients()]).flatten(1) for term in columns]
    together = torch.stack(parts, 1).double()
    return (together * weight.flatten()) @ together.mT
