"""Likelihoods: loss, residual, and the Hessian of the loss in the network's outputs, with a root of it.

Outputs are flat, `[n, C]`, with C the size of one example's output whatever its shape. A likelihood is told the
shape once (`shaped`), which is when a dense classifier's class axis is settled. Targets come with a weight for
each term of the loss, zero where `ignore_index` says so.

The output Hessian of one example is W = Σ_k τ_k L_k L_kᵀ: `root_transpose` gives Lᵀ without the noise, and
`output_precision` the τ of each output. τ is learnt by the evidence for the Gaussian and one for the others.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from linlap.errors import InputError, ShapeError, TargetError
from linlap.targets import Targets, aligned, finite, weights_of


@dataclass(frozen=True)
class Likelihood(ABC):
    """p(y | o) with −log p convex in the output o."""

    @property
    def name(self) -> str:
        """How files and summaries call it."""
        return type(self).__name__.lower()

    def shaped(self, output_shape: torch.Size, target_shape: torch.Size) -> "Likelihood":  # noqa: ARG002
        """The same likelihood, told the shapes `[...]` of one output and one target."""
        return self

    @abstractmethod
    def targets(self, raw: Tensor, weights: Tensor | None, output_shape: torch.Size) -> Targets:
        """Check the raw targets against the rule and bring them into the likelihood's form."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Targets) -> Tensor:
        """−log p of each example `[n]`, all constants in."""

    @abstractmethod
    def residual(self, outputs: Tensor, targets: Targets) -> Tensor:
        """r = ∂ℓ/∂o `[n, C]`."""

    @abstractmethod
    def root_transpose(self, outputs: Tensor, targets: Targets, columns: Tensor) -> Tensor:
        """Lᵀ·columns `[n, R, m]` from columns `[n, C, m]`, noise left out."""

    @abstractmethod
    def root(self, outputs: Tensor, targets: Targets, columns: Tensor) -> Tensor:
        """L·columns `[n, C, m]` from columns `[n, R, m]`, noise left out."""

    def mixed(self, outputs: Tensor, targets: Targets, columns: Tensor) -> Tensor:
        """S·columns `[n, C, m]` from columns `[n, C, m]` with SSᵀ = W, noise left out: for random columns."""
        return self.root(outputs, targets, columns)

    def curve(self, outputs: Tensor, targets: Targets, vector: Tensor) -> Tensor:
        """W·vector `[n, C]`, noise in."""
        rooted = self.root_transpose(outputs, targets, vector.unsqueeze(-1))
        curved = self.root(outputs, targets, rooted).squeeze(-1)
        return curved if self.output_precision is None else curved * self.output_precision

    @property
    def output_precision(self) -> Tensor | None:
        """τ of each output (one number or `[C]`), None where there is no noise to learn."""
        return None

    def noise_blocks(self, outputs: int) -> int:  # noqa: ARG002 (one an output only for the Gaussian)
        """How many noise levels there are among that many outputs."""
        return 0


@dataclass(frozen=True)
class Separable(Likelihood):
    """Likelihoods in which each output has its own target: W is diagonal."""

    @abstractmethod
    def curvature(self, outputs: Tensor) -> Tensor:
        """∂²ℓ/∂o² of each output, noise and weights left out."""

    def root_transpose(self, outputs: Tensor, targets: Targets, columns: Tensor) -> Tensor:
        """√w·columns."""
        return (self.curvature(outputs) * targets.weight).sqrt().to(columns.dtype).unsqueeze(-1) * columns

    def root(self, outputs: Tensor, targets: Targets, columns: Tensor) -> Tensor:
        """√w·columns."""
        return self.root_transpose(outputs, targets, columns)


@dataclass(frozen=True)
class Gaussian(Separable):
    """Regression, y ~ N(o, σ²).

    Args:
        noise: the standard deviation σ, one number or one an output; learnt by the evidence if None.
        per_output: learn one σ for each output instead of a shared one.

    Example:
        >>> import linlap as ll
        >>> ll.Gaussian(per_output=True)
        Gaussian(noise=None, per_output=True)
    """

    noise: float | Tensor | None = None
    per_output: bool = False

    def __post_init__(self) -> None:
        if self.noise is None:
            return
        try:
            noise = torch.as_tensor(self.noise, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            noise = torch.zeros(1)
        if not bool((torch.isfinite(noise) & (noise > 0)).all()):
            raise InputError(
                f"noise is a standard deviation and must be > 0, but it is {self.noise}: give a positive number"
            )

    def shaped(self, output_shape: torch.Size, target_shape: torch.Size) -> "Gaussian":  # noqa: ARG002
        """Check that a given noise is one number or one an output."""
        given = 1 if self.noise is None else torch.as_tensor(self.noise).numel()
        if given not in (1, output_shape.numel()):
            raise ShapeError(
                f"noise must be one number or one an output, but {given} came for {output_shape.numel()} outputs: "
                "give one standard deviation for each"
            )
        return self

    def noise_blocks(self, outputs: int) -> int:
        """One for a shared σ, else one an output."""
        given = 1 if self.noise is None else torch.as_tensor(self.noise).numel()
        return outputs if self.per_output or given > 1 else 1

    def at(self, noise: Tensor) -> "Gaussian":
        """The same likelihood with the standard deviations σ `[K]`."""
        return replace(self, noise=noise)

    @property
    def output_precision(self) -> Tensor:
        """1/σ²."""
        if self.noise is None:
            raise InputError(
                "the noise must be known here, but it is still to be learnt: fit first, or give Gaussian(noise=…)"
            )
        return torch.as_tensor(self.noise, dtype=torch.float64) ** -2

    def targets(self, raw: Tensor, weights: Tensor | None, output_shape: torch.Size) -> Targets:
        """Real numbers of the outputs' shape."""
        values = finite(aligned(raw, output_shape, "regression"))
        return Targets(values, weights_of(weights, len(raw), raw).unsqueeze(1))

    def squares(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Weighted squared residuals of each output, summed over the examples `[C]`."""
        return (targets.weight * (outputs - targets.values) ** 2).sum(0)

    def loss(self, outputs: Tensor, targets: Targets) -> Tensor:
        """½ (y−o)²/σ² + ½ log 2πσ², summed over the outputs."""
        precision = self.output_precision
        terms = 0.5 * (precision * (outputs - targets.values) ** 2 - torch.log(precision / (2 * math.pi)))
        return (targets.weight * terms).sum(1)

    def residual(self, outputs: Tensor, targets: Targets) -> Tensor:
        """(o−y)/σ²."""
        return targets.weight * (outputs - targets.values) * self.output_precision

    def curvature(self, outputs: Tensor) -> Tensor:
        """One: the noise is a factor of its own."""
        return torch.ones_like(outputs)


@dataclass(frozen=True)
class Bernoulli(Separable):
    """Binary or multi-label classification, one logit an output, labels 0 or 1 (or probabilities)."""

    def targets(self, raw: Tensor, weights: Tensor | None, output_shape: torch.Size) -> Targets:
        """Numbers in [0, 1] of the outputs' shape."""
        values = finite(aligned(raw, output_shape, "binary"))
        if bool(((values < 0) | (values > 1)).any()):
            raise TargetError(
                f"binary targets must lie in [0, 1], but they reach from {values.min():g} to {values.max():g}: "
                "recode the labels as 0 and 1"
            )
        return Targets(values, weights_of(weights, len(raw), raw).unsqueeze(1))

    def loss(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Binary cross entropy."""
        terms = functional.softplus(outputs) - targets.values * outputs
        return (targets.weight * terms).sum(1)

    def residual(self, outputs: Tensor, targets: Targets) -> Tensor:
        """p − y."""
        return targets.weight * (outputs.sigmoid() - targets.values)

    def curvature(self, outputs: Tensor) -> Tensor:
        """p (1 − p)."""
        return outputs.sigmoid() * (-outputs).sigmoid()


@dataclass(frozen=True)
class Poisson(Separable):
    """Counts, the output is the log of the rate."""

    def targets(self, raw: Tensor, weights: Tensor | None, output_shape: torch.Size) -> Targets:
        """Counts of the outputs' shape."""
        values = finite(aligned(raw, output_shape, "count"))
        if wrong := int(((values < 0) | (values != values.round())).sum()):
            raise TargetError(
                f"Poisson targets must be counts 0, 1, 2, …, but {wrong} of {values.numel()} are negative or fractional: pass "
                "counts"
            )
        return Targets(values, weights_of(weights, len(raw), raw).unsqueeze(1))

    def loss(self, outputs: Tensor, targets: Targets) -> Tensor:
        """e^o − y o + log y!."""
        terms = outputs.exp() - targets.values * outputs + torch.lgamma(targets.values + 1)
        return (targets.weight * terms).sum(1)

    def residual(self, outputs: Tensor, targets: Targets) -> Tensor:
        """e^o − y."""
        return targets.weight * (outputs.exp() - targets.values)

    def curvature(self, outputs: Tensor) -> Tensor:
        """e^o."""
        return outputs.exp()


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Classification by softmax, also dense (a class for each pixel or token).

    Args:
        class_axis: the axis of the output, batch axis counted, that holds the classes. Deduced from the targets'
            shape if None; where two axes would fit, axis 1.
        ignore_index: a label that marks places without a target.

    Example:
        >>> import linlap as ll
        >>> ll.Categorical(ignore_index=255).ignore_index
        255
    """

    class_axis: int | None = None
    ignore_index: int = -100
    shape: tuple[int, ...] = ()

    @property
    def classes(self) -> int:
        """K."""
        return self.shape[self._axis]

    @property
    def _axis(self) -> int:
        """The class axis of one example's output."""
        return (1 if self.class_axis is None else self.class_axis) - 1

    def shaped(self, output_shape: torch.Size, target_shape: torch.Size) -> "Categorical":
        """Settle the class axis: the one whose removal leaves the targets' shape, axis 1 first."""
        axes = len(output_shape) + 1
        for axis in range(1, axes):
            without = (*output_shape[: axis - 1], *output_shape[axis:])
            if self.class_axis in (None, axis, axis - axes) and tuple(target_shape) == without:
                return replace(self, class_axis=axis, shape=tuple(output_shape))
        raise ShapeError(
            f"class labels must have the outputs' shape [n, {', '.join(map(str, output_shape))}] without its class axis, "
            f"but they have shape [n{''.join(f', {s}' for s in target_shape)}]: pass integer class indices "
            "(not one-hot), or name the axis with Categorical(class_axis=…)"
        )

    def targets(self, raw: Tensor, weights: Tensor | None, output_shape: torch.Size) -> Targets:
        """Integer labels 0 … K−1 of the outputs' shape without the class axis."""
        if raw.is_floating_point() or raw.is_complex() or raw.dtype == torch.bool:
            raise TargetError(
                f"class labels must be integers, but they are {raw.dtype}: pass class indices of dtype torch.long"
            )
        shaped = self.shaped(output_shape, raw.shape[1:])
        if shaped != self:
            raise ShapeError(
                f"all outputs must have the shape {list(self.shape)} of the first batch, but one has {list(output_shape)}: "
                "pad or crop the examples to one size"
            )
        labels = raw.reshape(len(raw), -1).long()
        kept = labels != self.ignore_index
        wrong = labels[kept & ((labels < 0) | (labels >= self.classes))]
        if len(wrong):
            raise TargetError(
                f"labels must lie in 0 … {self.classes - 1} for {self.classes} outputs, but {len(wrong)} do not, for example "
                f"{int(wrong[0])}: recode the labels, or give the network as many outputs as there are classes (one logit for "
                "two classes is ll.Bernoulli())"
            )
        return Targets(labels.where(kept, 0), weights_of(weights, len(raw), raw).unsqueeze(1) * kept)

    def sites(self, outputs: Tensor) -> Tensor:
        """Flat outputs `[n, C, ...]` as `[n, sites, K, ...]`."""
        rest = outputs.shape[2:]
        unfolded = outputs.reshape(len(outputs), *self.shape, *rest).movedim(self._axis + 1, len(self.shape))
        return unfolded.reshape(len(outputs), -1, self.classes, *rest)

    def flat(self, sites: Tensor) -> Tensor:
        """Inverse of `sites`."""
        rest, places = sites.shape[3:], [s for i, s in enumerate(self.shape) if i != self._axis]
        unfolded = sites.reshape(len(sites), *places, self.classes, *rest).movedim(len(self.shape), self._axis + 1)
        return unfolded.reshape(len(sites), -1, *rest)

    def loss(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Cross entropy."""
        log_p = self.sites(outputs).log_softmax(-1)
        return -(targets.weight * log_p.gather(-1, targets.values.unsqueeze(-1)).squeeze(-1)).sum(1)

    def residual(self, outputs: Tensor, targets: Targets) -> Tensor:
        """p − e_y."""
        p = self.sites(outputs).softmax(-1)
        p = p.scatter_add(-1, targets.values.unsqueeze(-1), -torch.ones_like(p[..., :1]))
        return self.flat(p * targets.weight.unsqueeze(-1))

    def curve(self, outputs: Tensor, targets: Targets, vector: Tensor) -> Tensor:
        """W = diag(p) − ppᵀ, without the root."""
        p, v = self.sites(outputs).softmax(-1), self.sites(vector)
        return self.flat(targets.weight.unsqueeze(-1) * p * (v - (p * v).sum(-1, keepdim=True)))

    def thin_root(self, outputs: Tensor) -> Tensor:
        """L `[n, sites, K, K−1]` with LLᵀ = diag(p) − ppᵀ.

        S = diag(√p) − p√pᵀ has SSᵀ = W and S√p = 0. The reflection that takes √p to the last axis therefore turns
        the last column of S to zero, and it can be dropped: softmax has one direction less than classes.
        """
        p = self.sites(outputs).softmax(-1)
        q = p.sqrt()
        root = torch.diag_embed(q) - p.unsqueeze(-1) * q.unsqueeze(-2)
        mirror = q.clone()
        mirror[..., -1] += 1
        reflected = root - root[..., -1:] * (mirror / (1 + q[..., -1:])).unsqueeze(-2)
        return reflected[..., :-1]

    def root_transpose(self, outputs: Tensor, targets: Targets, columns: Tensor) -> Tensor:
        """Lᵀ·columns at every site."""
        root = (self.thin_root(outputs) * targets.weight.sqrt()[..., None, None]).to(columns.dtype)
        return (root.mT @ self.sites(columns)).flatten(1, 2)

    def root(self, outputs: Tensor, targets: Targets, columns: Tensor) -> Tensor:
        """L·columns at every site."""
        root = (self.thin_root(outputs) * targets.weight.sqrt()[..., None, None]).to(columns.dtype)
        return self.flat(root @ columns.reshape(len(columns), -1, self.classes - 1, columns.shape[-1]))

    def mixed(self, outputs: Tensor, targets: Targets, columns: Tensor) -> Tensor:
        """(diag(√p) − p√pᵀ)·columns at every site, without a matrix."""
        p, e = self.sites(outputs).softmax(-1).unsqueeze(-1), self.sites(columns)
        q = p.sqrt()
        return self.flat(targets.weight.sqrt()[..., None, None] * (q * e - p * (q * e).sum(2, keepdim=True)))


def named(likelihood: Likelihood | str) -> Likelihood:
    """`"regression"` and `"classification"` as their likelihoods."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    by_name = {"regression": Gaussian(), "classification": Categorical()}
    if isinstance(likelihood, str) and likelihood in by_name:
        return by_name[likelihood]
    raise InputError(
        f'likelihood must be "regression", "classification" or one of ll.Gaussian(), ll.Categorical(), ll.Bernoulli(), '
        f"ll.Poisson(), but it is {likelihood!r}: choose one of these, with its brackets"
    )
