"""The prior N(0, Λ⁻¹), Λ = diag(λ_k t_g): which precisions are learnt, and what scales them.

| structure | groups | t_g | learnt |
| --- | --- | --- | --- |
| single | one | 1 | one λ |
| layer, tensor, normalised, channel, mapping | many | 1 | a λ each |
| curvature | tensors | mean curvature tr(H_g)/d_g | one λ: the group g-prior |
| curvature-layer | modules | mean curvature | one λ |
| gauge | normalised groups | d_g/‖θ̃_g‖², the canonical gauge | one λ |
| hyper | tensors | mean curvature | a λ each, pulled to their mean on the log scale |

t_g moves with the arbitrary scale of a normalised group exactly as a precision must, so that a shared λ does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from linlap import groups as partitions
from linlap.errors import InputError
from linlap.groups import Groups
from linlap.network import Layout

Structure = str | Mapping[str, str | Sequence[str]]
STRUCTURES = (
    "auto", "single", "layer", "normalised", "tensor", "channel",
    "curvature", "curvature-layer", "gauge", "hyper",
)  # fmt: skip
AUTO = "curvature"
SHARED = ("single", "curvature", "curvature-layer", "gauge")
NEED_NORMALISED = ("single", "layer", "normalised", "channel", "curvature-layer", "gauge")
HYPERPRIOR_SPREAD = 0.3


@dataclass(frozen=True)
class Prior:
    """Λ of all P weights from K learnt log precisions.

    `scale` is t `[G]`, `tie` `[G]` the learnt precision each group uses, `pull` the standard deviation of a Gaussian
    hyperprior that ties the log precisions to their mean, or None.
    """

    structure: str
    groups: Groups
    scale: Tensor
    tie: Tensor
    log_precision: Tensor
    pull: float | None = None

    def at(self, log_precision: Tensor) -> "Prior":
        """The same structure with other log precisions `[K]`."""
        return replace(self, log_precision=log_precision)

    @property
    def by_group(self) -> Tensor:
        """Effective precision λ_k t_g of each group `[G]`."""
        return self.log_precision.exp()[self.tie] * self.scale

    @cached_property
    def precision(self) -> Tensor:
        """Λ, the precision of each weight `[P]`."""
        return self.groups.spread(self.by_group)

    @cached_property
    def learnt(self) -> Tensor:
        """The learnt precision each weight uses `[P]`, a number from 0 to K−1."""
        return self.tie[self.groups.membership]

    def sum(self, per_weight: Tensor) -> Tensor:
        """Sums over the weights that share a learnt precision `[..., K]`, from numbers `[..., P]`."""
        zeros = per_weight.new_zeros(*per_weight.shape[:-1], len(self.log_precision))
        return zeros.index_add(-1, self.learnt, per_weight)

    def squares(self, weights: Tensor) -> Tensor:
        """‖θ‖²_Λ of each learnt precision's weights `[K]`."""
        return self.sum(self.precision * weights**2)

    def penalty(self) -> tuple[float, Tensor, Tensor]:
        """Minus the log hyperprior of the log precisions, its gradient `[K]` and Hessian `[K, K]`."""
        k = len(self.log_precision)
        if self.pull is None:
            return 0.0, torch.zeros(k, dtype=torch.float64), torch.zeros(k, k, dtype=torch.float64)
        centring = (torch.eye(k, dtype=torch.float64) - 1 / k) / self.pull**2
        gradient = centring @ self.log_precision.cpu()
        return float(0.5 * self.log_precision.cpu() @ gradient), gradient, centring


def build(
    structure: Structure,
    layout: Layout,
    normalised: Sequence[Sequence[str]],
    curvature: Tensor,
    trained: Tensor,
    energy: float,
) -> Prior:
    """The prior of that structure, its precisions at their start.

    `curvature` `[P]` is the diagonal of H, `energy` is Σ fᵀWf: the start gives each group an equal share of a prior
    predictive energy tr(HΛ⁻¹) equal to it. All of it moves with the scale of a group as a precision must.
    """
    name = resolved(structure)
    groups = _groups(name, structure, layout, normalised).to(curvature.device)
    traces = groups.sum(curvature)
    means = _mean_curvature(groups, traces, trained)
    scale = torch.ones_like(means)
    if name in ("curvature", "curvature-layer", "hyper"):
        scale = means
    if name == "gauge":
        scale = _gauge(groups, normalised, trained)
    shared = name in SHARED
    tie = (
        torch.zeros(len(groups), dtype=torch.long, device=scale.device)
        if shared
        else torch.arange(len(groups), device=scale.device)
    )
    learnt = 1 if shared else len(groups)
    share = torch.zeros(learnt, dtype=torch.float64, device=scale.device)
    share = share.index_add(0, tie, means * groups.sizes / scale) * learnt / (energy or float(groups.sizes.sum()))
    return Prior(name, groups, scale, tie, share.log(), HYPERPRIOR_SPREAD if name == "hyper" else None)


def count(structure: Structure, layout: Layout, normalised: Sequence[Sequence[str]]) -> int:
    """How many precisions a structure learns."""
    name = resolved(structure)
    return 1 if name in SHARED else len(_groups(name, structure, layout, normalised))


def grouped(structure: Structure, layout: Layout, normalised: Sequence[Sequence[str]]) -> Groups:
    """The groups of a structure."""
    return _groups(resolved(structure), structure, layout, normalised)


def mixes(structure: Structure, layout: Layout, normalised: Sequence[Sequence[str]]) -> list[str]:
    """The normalised groups whose scale the structure ties to that of other weights, in words."""
    name = resolved(structure)
    if name == "gauge":
        return []
    groups = _groups(name, structure, layout, normalised)
    found = []
    for joint in normalised:
        for names in groups.parameters.values():
            if set(names) & set(joint) and not set(names) <= set(joint):
                found.append(", ".join(joint))
                break
    return found


def resolved(structure: Structure) -> str:
    """The structure's name, "auto" settled."""
    return "mapping" if isinstance(structure, Mapping) else AUTO if structure == "auto" else structure


def _groups(name: str, structure: Structure, layout: Layout, normalised: Sequence[Sequence[str]]) -> Groups:
    if isinstance(structure, Mapping):
        return partitions.by_mapping(layout, structure)
    if name not in STRUCTURES:
        raise InputError(
            f"prior must be one of {', '.join(map(repr, STRUCTURES))} or a mapping from group names to patterns of "
            f"parameter names, but it is {structure!r}: choose one of these"
        )
    if name == "single":
        return partitions.single(layout)
    if name in ("layer", "curvature-layer"):
        return partitions.by_layer(layout, normalised)
    if name in ("normalised", "gauge"):
        return partitions.by_normalised(layout, normalised)
    if name == "channel":
        return partitions.by_channel(layout, normalised)
    return partitions.by_tensor(layout)


def _mean_curvature(groups: Groups, traces: Tensor, trained: Tensor) -> Tensor:
    """tr(H_g)/d_g; where it is zero, the one an average group of that norm would have, which moves alike."""
    means = traces / groups.sizes
    norms = groups.sum(trained**2)
    seen = traces > 0
    if bool(seen.all()):
        return means
    if not bool(seen.any()):
        return torch.ones_like(means)
    known, usual = seen & (norms > 0), means[seen].median()
    if not bool(known.any()):
        return torch.where(seen, means, usual)
    typical = (traces * norms / groups.sizes**2)[known].median()
    stand_in = torch.where(norms > 0, typical * groups.sizes / norms.clamp(min=1e-300), usual)
    # a scale may be arbitrary, but not beyond what numbers can hold beside the others
    return torch.where(seen, means, stand_in.clamp(means[seen].min() * 1e-12, means[seen].max() * 1e12))


def _gauge(groups: Groups, normalised: Sequence[Sequence[str]], trained: Tensor) -> Tensor:
    """Precisions in the canonical gauge, in which every normalised group has mean square one."""
    canonical = groups.sizes / groups.sum(trained**2)
    rescaled = torch.tensor([g < len(normalised) for g in range(len(groups))], device=trained.device)
    return torch.where(rescaled, canonical, torch.ones_like(canonical))
