"""`ll.fit`: everything chosen, learnt and reported in one call."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from linlap import checks, evidence, planning, symmetry
from linlap import prior as priors
from linlap.alternate import AtOptimum, AtTrained, Centre, Found, Search, Tolerance
from linlap.calibration import calibrate
from linlap.curvature.base import Curvature, Structure
from linlap.data import Batch, batches, census, dropped, is_pair
from linlap.errors import ConvergenceWarning, DataWarning, EvidenceWarning, InvarianceWarning
from linlap.evidence import Setting
from linlap.features import Linearised, Model, linearise
from linlap.likelihood import Gaussian, Likelihood, named
from linlap.network import Chosen
from linlap.paper import PaperSolver
from linlap.posterior import Noise, Posterior, Status
from linlap.predictive import Predictive
from linlap.prior import Structure as PriorStructure
from linlap.problem import Problem, pose
from linlap.progress import Report, shown
from linlap.state import random_state_kept
from linlap.targets import Targets
from linlap.tree import map_leaves

REFERENCE_EXAMPLES = 1000
"""Training examples whose epistemic scores are kept, to rank new ones against."""

MOST_OUTPUTS = 256
"""Outputs of an example above which its score is kept as it is: leaving it out is cubic in them."""

LEAST_LEFT = 1e-9
"""Share of the information about an output that the other examples hold at least: the rest is rounding."""

REFRESHES = 5
"""Most times H is taken anew at θ⋆ when that was asked for."""

OVERCONFIDENT = 0.25
"""Share of the curvature at θ⋆ below which the trained network's is called overconfident."""

PRUNED = 1e-3
"""Effective dimensions below which a group is called pruned."""

Solver = Literal["newton", "paper"]


def fit(
    net: nn.Module | Linearised,
    data: Any,
    likelihood: Likelihood | str,
    *,
    model: Model = "linear",
    prior: PriorStructure = "auto",
    curvature: str | Structure = "auto",
    evidence_at: Literal["optimum", "trained"] = "optimum",
    params: Chosen = None,
    held_out: Any = None,
    n_data: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    memory: str | int | None = None,
    hessian_at: Literal["trained", "optimum"] = "trained",
    solver: Solver | PaperSolver = "newton",
    update: evidence.Update = "newton",
    most_rounds: int = 60,
) -> Posterior:
    """Give a trained network a posterior with calibrated error bars and a model evidence.

    The network is only read. Everything is chosen and learnt: no option is needed.

    Args:
        net: the trained network, or what `ll.linearise` returns.
        data: its training data: batches `(x, y)`, `(x, y, weights)` or dicts with `labels`, or one pair `(X, Y)`.
        likelihood: `"regression"`, `"classification"`, or a likelihood such as `ll.Gaussian(per_output=True)`.
        model: `"linear"`, h = Jθ, or `"affine"`, the Taylor model h = f + J(θ − θ̃).
        prior: which weights share a precision; see `linlap.prior`.
        curvature: `"dense"` or `"dual"`, which are exact, `"kron"` or `"diagonal"` for networks of any size, `"sampled"` for
            the whole curvature by samples, `"auto"` for the best that fits, or an object with the curvature interface.
        evidence_at: `"optimum"`, or `"trained"` for the naive method, to compare.
        params: which weights get a posterior: all, `"weights"`, `"last_layer"`, or a predicate.
        held_out: data the network never saw, to calibrate the variance and the noise on.
        n_data: how many examples a pass is expected to yield; another number is warned about.
        seed: of everything random: the same seed and data give the same posterior.
        progress: show what is done; None does so in a terminal only.
        memory: how much may be used, such as `"4GiB"`; half of what is free if None.
        hessian_at: where W of the curvature is taken: at the trained network, or refreshed at θ⋆.
        solver: of θ⋆: `"newton"`, or `"paper"` for the original's early-stopped Adam.
        update: of the precisions: `"newton"` on the profile, `"mackay"`, or `"sqrt-mackay"`.
        most_rounds: where to stop, converged or not.

    Example:
        >>> import linlap as ll, torch
        >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> post = ll.fit(net, (x, x**2), "regression", progress=False)
        >>> post.status.converged
        True
    """
    checks.choice("model", model, ("linear", "affine"))
    checks.choice("evidence_at", evidence_at, ("optimum", "trained"))
    checks.choice("hessian_at", hessian_at, ("trained", "optimum"))
    if not isinstance(solver, PaperSolver):
        checks.choice("solver", solver, ("newton", "paper"))
    checks.choice("update", update, ("newton", "mackay", "sqrt-mackay"))
    with random_state_kept(), shown(progress) as report:
        torch.manual_seed(seed)
        budget = planning.memory_in_bytes(memory)
        report("reading the data")
        problem = pose(linearise(net, params), data, named(likelihood), model, budget)
        notes = _same_twice(data, problem.batches, n_data)
        choice = Choice(prior, curvature, evidence_at, hessian_at, solver, update, most_rounds)
        post = _fitted(problem, choice, notes, report, seed)
        if held_out is not None:
            report("calibrating on held-out data")
            post = calibrate(post, held_out)
    return post


@dataclass(frozen=True)
class Choice:
    """What the caller chose."""

    prior: PriorStructure
    curvature: str | Structure
    evidence_at: str
    hessian_at: str
    solver: Solver | PaperSolver
    update: evidence.Update
    most_rounds: int

    def centre(self, tolerance: Tolerance) -> Centre:
        """Where the evidence is taken."""
        if self.evidence_at == "trained":
            return AtTrained()
        if self.solver == "newton":
            return AtOptimum(tolerance.weights)
        return self.solver if isinstance(self.solver, PaperSolver) else PaperSolver(tolerance.weights)


def _fitted(problem: Problem, choice: Choice, notes: list[str], report: Report, seed: int) -> Posterior:
    """The posterior of a posed problem."""
    noise, posed = _first_noise(problem)
    report("finding the groups")
    normalised, warned = _normalised(problem, choice.prior)
    precisions = priors.count(choice.prior, problem.linearised.network.layout, normalised)
    sizes = planning.Sizes(problem.examples, problem.outputs, problem.weights, precisions)
    structure = planning.choose(choice.curvature, sizes, problem.memory)
    structure = structure if isinstance(choice.curvature, Structure) else structure.seeded(seed)
    report(f"curvature ({structure.name})")
    curvature = structure.of(problem, problem.network_outputs)
    precision = torch.ones(1, dtype=torch.float64) if noise is None else noise**-2
    diagonal = (precision.to(posed.offset.device).unsqueeze(1) * curvature.diagonal()).sum(0)
    start = Setting(_first_prior(posed, choice, normalised, diagonal), noise, _learns_noise(problem))
    report("weights and evidence")
    curvature, found, outputs = _searched(
        problem, choice, curvature, start, evidence.bounds(start.prior, diagonal), report
    )
    if not found.converged:
        warnings.warn(f"the search did not converge: {found.message}", ConvergenceWarning, stacklevel=3)
    report("the evidence's own curvature")
    log_evidence, error, remarks = _reported(problem, curvature, found, choice.evidence_at)
    post = Posterior(
        linearised=problem.linearised,
        likelihood=problem.likelihood,
        model=problem.model,
        evidence_at=choice.evidence_at,
        curvature=structure.name,
        setting=found.setting,
        factor=found.factor,
        optimum=found.optimum.weights,
        output_shape=problem.output_shape,
        examples=problem.examples,
        log_evidence=log_evidence,
        log_evidence_error=error,
        history=found.history,
        status=Status(found.converged, found.message),
        noises=_noises(problem, found, choice.evidence_at),
        reference=torch.zeros(0, dtype=torch.float64),
        memory=problem.memory,
        seed=seed,
        notes=(*notes, *warned, *remarks, *_bounded(curvature), *_pruned(found), *_noiseless(problem, found)),
    )
    report("scores of the training examples")
    return post.calibrated(post.calibration, _reference(post, problem, outputs))


def _searched(
    problem: Problem,
    choice: Choice,
    curvature: Curvature,
    start: Setting,
    limits: tuple[Tensor, Tensor],
    report: Report,
) -> tuple[Curvature, Found, Tensor]:
    """Search with H at the trained network; again with H at θ⋆, until it stays, if that was asked for.

    Also the outputs at which W of that H was taken.
    """
    tolerance = Tolerance.of(problem.linearised.network.dtype)
    centre = choice.centre(tolerance)

    def search(at: Curvature, begin: Setting) -> Found:
        return Search(problem, at, centre, tolerance, limits, choice.update, choice.most_rounds, report.value).run(
            begin
        )

    found, outputs = search(curvature, start), problem.network_outputs
    if choice.hessian_at == "trained" or isinstance(problem.likelihood, Gaussian):
        return curvature, found, outputs
    for _ in range(REFRESHES):
        before, outputs = found.setting.z, found.optimum.outputs
        curvature = curvature.at(outputs)
        found = search(curvature, found.setting)
        if float((found.setting.z - before).abs().max()) < 1e-3:
            break
    return curvature, found, outputs


def _learns_noise(problem: Problem) -> bool:
    return isinstance(problem.likelihood, Gaussian) and problem.likelihood.noise is None


def _first_noise(problem: Problem) -> tuple[Tensor | None, Problem]:
    """σ at the start `[K]`, that of the network's own residuals unless it is given, and the problem under it."""
    likelihood = problem.likelihood
    if not isinstance(likelihood, Gaussian):
        return None, problem
    if likelihood.noise is None:
        squares = _mean_squares(problem, problem.network_outputs)
        noise = squares.clamp(min=evidence.noise_limits(problem, len(squares))[0]).sqrt()
    else:
        given = torch.as_tensor(likelihood.noise, dtype=torch.float64).reshape(-1)
        noise = given.expand(max(len(given), likelihood.noise_blocks(problem.outputs))).clone()
    return noise, problem.at(likelihood.at(noise))


def _mean_squares(problem: Problem, outputs: Tensor) -> Tensor:
    """Mean squared residual of each noise level `[K]`."""
    weight = problem.targets.weight
    squares = (weight * (outputs - problem.targets.values) ** 2).sum(0) / weight.sum()
    return squares if problem.likelihood.noise_blocks(problem.outputs) > 1 else squares.mean().reshape(1)


def _normalised(problem: Problem, structure: PriorStructure) -> tuple[list[tuple[str, ...]], list[str]]:
    """Normalised groups where the prior asks for them, and a warning if it ties them to anything else."""
    if not isinstance(structure, Mapping) and structure not in priors.NEED_NORMALISED:
        return [], []
    found = symmetry.detect(problem.linearised, problem.batches[0].rows(0, 32).inputs)
    normalised = found.groups_for(structure)
    layout = problem.linearised.network.layout
    mixed = priors.mixes(structure, layout, normalised)
    if not mixed:
        return normalised, []
    message = (
        f"the scale of normalised weights is arbitrary, and this prior ({priors.resolved(structure)}) ties it to other "
        f"weights ({'; '.join(mixed)}): error bars and evidence depend on it. "
        'Use prior="auto", or give these weights groups of their own'
    )
    warnings.warn(message, InvarianceWarning, stacklevel=4)
    return normalised, [message]


def _first_prior(
    problem: Problem, choice: Choice, normalised: Sequence[Sequence[str]], diagonal: Tensor
) -> priors.Prior:
    """The prior's structure, with scales from the curvature, at its start."""
    f = problem.network_outputs
    energy = float((f * problem.likelihood.curve(f, problem.targets, f)).sum())
    layout = problem.linearised.network.layout
    return priors.build(choice.prior, layout, normalised, diagonal, problem.trained, energy)


def _reported(problem: Problem, curvature: Curvature, found: Found, evidence_at: str) -> tuple[float, float, list[str]]:
    """The log evidence: −F, but with the curvature at θ⋆ where that differs (not for the Gaussian likelihood); its error."""
    setting, optimum, factor = found.setting, found.optimum, found.factor
    moved = not isinstance(problem.likelihood, Gaussian) and evidence_at != "trained"
    own = curvature.at(optimum.outputs) if moved else curvature
    if moved:
        factor = own.factor(setting.prior, setting.noise_precision)
    value = -evidence.objective(setting.pose(problem), setting, factor, optimum) + setting.prior.penalty()[0]
    share, error = float(curvature.diagonal().sum() / own.diagonal().sum()), 0.5 * factor.log_determinant_error
    if not moved or share >= OVERCONFIDENT:
        return value, error, []
    message = (
        f"the curvature at the trained network is only {share:.0%} of that at the linear model's optimum: the network is "
        "overconfident on its training data, and its evidence should not be compared with that of a network which is not. "
        'For its error bars try hessian_at="optimum", or held_out='
    )
    warnings.warn(message, EvidenceWarning, stacklevel=4)
    return value, error, [message]


def _noises(problem: Problem, found: Found, evidence_at: str) -> Noise | None:
    """σ² about the linear model, about the network (never smaller), and of the plain network."""
    if found.setting.noise is None:
        return None
    own, levels = found.setting.noise**2, len(found.setting.noise)
    least = evidence.noise_limits(problem, levels)[0]
    plain = _mean_squares(problem, problem.network_outputs).expand(levels).clamp(min=least)
    if evidence_at == "trained":
        return Noise(own, own, plain)
    if found.setting.learns_noise:
        fitted = _mean_squares(problem, found.optimum.outputs).expand(levels)
        return Noise(own, own + (plain - fitted).clamp(min=0), plain)
    kept = -found.factor.sensitivities().gradient[-levels:]
    counts = problem.targets.weight.sum() * (1 if levels == problem.outputs else problem.outputs)
    return Noise(own, plain + own * kept / counts, plain)


def _bounded(curvature: Curvature) -> list[str]:
    """A line where the evidence is not exact."""
    return [curvature.note] if curvature.note else []


def _pruned(found: Found) -> list[str]:
    """A line that names the groups of which the evidence wants nothing."""
    setting = found.setting
    kept = setting.prior.groups.sum(found.factor.effective_dimensions()).tolist()
    gone = [name for name, dims in zip(setting.prior.groups.names, kept, strict=True) if dims < PRUNED]
    return [f"pruned by the evidence (no direction determined): {', '.join(gone)}"] if gone else []


def _noiseless(problem: Problem, found: Found) -> list[str]:
    """A line where a learnt noise has gone to its lower limit."""
    if not found.setting.learns_noise or found.setting.noise is None:
        return []
    least = evidence.noise_limits(problem, len(found.setting.noise))[0]
    if bool((found.setting.noise**2 > 1.01 * least).all()):
        return []
    return [
        "the noise is at its lower limit, a hundred-thousandth of the targets' spread: the linear model fits them exactly"
    ]


def _reference(post: Posterior, problem: Problem, outputs: Tensor) -> Tensor:
    """Epistemic scores of up to a thousand training examples, evenly spaced, sorted `[m]`, each as if it were new."""
    step, scores, start = -(-problem.examples // REFERENCE_EXAMPLES), [], 0
    at_once = max(1, 2**22 // problem.outputs**2)
    for batch in problem.batches:
        for chosen in torch.arange((-start) % step, len(batch), step).split(at_once):
            predicted = post.predict(map_leaves(lambda t, c=chosen: t[c], batch.inputs))
            scores.append(_left_out(predicted, problem, outputs, start + chosen, post.setting.noise_precision))
        start += len(batch)
    return torch.cat(scores).sort().values


def _left_out(predicted: Predictive, problem: Problem, outputs: Tensor, rows: Tensor, levels: Tensor) -> Tensor:
    """Total epistemic variance `[m]` of training examples without what each of them has told itself.

    Without an example's own W = AᵀA the covariance C of its outputs is (C⁻¹ − W)⁻¹ = C + CAᵀ(I − ACAᵀ)⁻¹AC.
    """
    if problem.outputs > MOST_OUTPUTS:
        return predicted.epistemic_score.double()
    cov, rows = predicted.cov.double(), rows.to(outputs.device)
    targets = Targets(problem.targets.values[rows], problem.targets.weight[rows])
    identity = torch.eye(problem.outputs, dtype=torch.float64, device=outputs.device).expand(len(rows), -1, -1)
    root = problem.likelihood.root_transpose(outputs[rows], targets, identity)
    root = root * levels.sqrt().repeat(root.shape[1] // len(levels)).unsqueeze(-1)
    seen = root @ cov
    leverages, axes = torch.linalg.eigh(seen @ root.mT)
    gained = (axes.mT @ seen).square().sum(-1) / (1 - leverages).clamp(min=LEAST_LEFT)
    return cov.diagonal(dim1=1, dim2=2).sum(-1) + gained.sum(-1)


def _same_twice(data: Any, held: list[Batch], n_data: int | None) -> list[str]:
    """Compare a second pass with the first: augmentation and dropped examples would give another problem each time."""
    first = census(held)
    messages = []
    if n_data is not None and n_data != first.examples:
        messages.append(
            f"a pass over the data should yield n_data={n_data} examples, but it yielded {first.examples}: the posterior "
            "is that of the examples that came"
        )
    if not is_pair(data) and not isinstance(data, list | tuple):
        second = census(batches(data))
        if second != first:
            what = (
                f"{first.examples} and {second.examples} examples"
                if second.examples != first.examples
                else "the same number of examples, but not the same ones"
            )
            messages.append(
                f"two passes over the data must yield the same examples, but they yielded {what}: switch off augmentation "
                "and drop_last for this loader. The first pass was used"
            )
        elif left_out := dropped(data, first.examples):
            messages.append(
                f"a pass over the data must yield every example, but drop_last left {left_out} out: switch it off for this loader"
            )
    for message in messages:
        warnings.warn(message, DataWarning, stacklevel=3)
    return messages
