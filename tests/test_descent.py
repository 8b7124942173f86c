"""The search for θ⋆ in few passes: what a pass sees, what lies between passes, and whether its certificate can be believed."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import cases
import linlap as ll
from fitted import LIKELIHOODS, close, fit
from linlap.alternate import AtOptimum
from linlap.objective import Objective, Point, Seen
from linlap.problem import Problem, Streamed
from linlap.weights import Optimum, trained_start, zero_start
from test_paper_algorithm import Posed, posed

EACH = cases.named("mlp-two-outputs", "mlp-classes", "bernoulli", "poisson", "image-classes", "batch-norm", "attention")
STARTS = pytest.mark.parametrize("start", [zero_start, trained_start])


def streamed(problem: Problem) -> Problem:
    """Nothing held: each product with J is a pass through the network."""
    return replace(problem, sweeps=Streamed(problem.linearised, problem.batches, problem.outputs))


def directions(problem: Problem, count: int) -> list[Seen]:
    torch.manual_seed(1)
    steps = torch.randn(count, problem.weights, dtype=torch.float64)
    return [Seen(s, problem.sweeps.forward(s), torch.zeros_like(s)) for s in steps]


def descended(at: Posed, start: Point, tolerance: float) -> Optimum:
    problem, *rest = at
    return AtOptimum(tolerance).settle(streamed(problem), *rest, start)


@cases.every(EACH)
def test_a_pass_sees_the_gradient_and_a_direction(case):
    """Each is what sweeps of their own give, streamed as well as held in memory."""
    problem, setting, _, _ = posed(case, "linear")
    point = trained_start(problem)
    step = torch.linspace(-1, 1, problem.weights, dtype=torch.float64)
    pushed = problem.sweeps.forward(step)
    W_pushed = problem.likelihood.curve(point.outputs, problem.targets, pushed)
    for own in (problem, streamed(problem)):
        before = own.passes
        gradient, seen = Objective(own, setting.prior.precision).look(point, step)
        assert own.passes - before == (own.passes > 0)
        r = problem.likelihood.residual(point.outputs, problem.targets)
        close(gradient, problem.sweeps.backward(r) + setting.prior.precision * point.weights, 1e-10)
        close(seen.outputs, pushed, 1e-10)
        close(seen.product, problem.sweeps.backward(W_pushed), 1e-10)


@cases.every(EACH)
def test_minimum_in_a_span(case):
    """The gradient there is orthogonal to the span, the lengths lead there, and the value has fallen."""
    problem, setting, _, _ = posed(case, "linear")
    objective, start, span = Objective(problem, setting.prior.precision), zero_start(problem), directions(problem, 4)
    lengths, end = objective.within(start, span)
    gradient = objective.gradient(end)
    for seen in span:
        slope = objective.gradient(start) @ seen.step
        assert abs(float(gradient @ seen.step)) <= 1e-3 * abs(float(slope))
    close(end.weights, sum(a * s.step for a, s in zip(lengths, span, strict=True)), 1e-10)
    close(end.outputs, problem.linear_outputs(end.weights), 1e-9)
    assert objective(end) < objective(start)


def test_minimum_in_a_span_with_dependent_directions():
    """A direction twice, and a sum of two, are no more than they are once."""
    problem, setting, _, _ = posed(cases.CASES["mlp-classes"], "linear")
    objective, start, (a, b) = Objective(problem, setting.prior.precision), zero_start(problem), directions(problem, 2)
    both = Seen(a.step + b.step, a.outputs + b.outputs, a.product)
    assert objective(objective.within(start, [a, b, a, both])[1]) == pytest.approx(
        objective(objective.within(start, [a, b])[1]), rel=1e-6
    )


@STARTS
@cases.every(EACH)
def test_the_certificate_can_be_believed(case, start):
    """Where products are seen one at a time, the objective is above its minimum by no more than a few decrements."""
    at = posed(case, "linear", log_precision=-1.0)
    best = AtOptimum(1e-16).settle(*at, zero_start(at[0]))
    for tolerance in (1e-3, 1e-6, 1e-9):
        end = descended(at, start(at[0]), tolerance)
        assert end.converged
        assert end.objective - best.objective <= 3 * end.decrement + 1e-12 * abs(best.objective)


@cases.every(cases.named("mlp-classes", "bernoulli", "image-classes", "batch-norm"))
def test_few_passes(case):
    """At most 20 from zero and 10 from where the precision was e times as large or small, at the evidence's own."""
    net, X, Y, likelihood = case.make()
    setting = fit(net, (X, Y), LIKELIHOODS[likelihood]).setting
    problem, _, curvature, _ = posed(case, "linear")
    zero = zero_start(problem)

    def at(folds: float) -> Posed:
        there = setting.at(setting.z + folds)
        return problem, there, curvature, curvature.factor(there.prior, there.noise_precision)

    assert descended(at(0.0), zero, 1e-6).passes <= 20
    for folds in (-1.0, 1.0):
        assert descended(at(0.0), descended(at(folds), zero, 1e-9), 1e-6).passes <= 10


def test_nothing_to_descend():
    """Targets that zero weights meet exactly leave no direction to go."""
    net, X = nn.Linear(3, 1, bias=False).double(), torch.randn(20, 3, dtype=torch.float64)
    post = fit(net, (X, torch.zeros(20, 1, dtype=torch.float64)), ll.Gaussian(noise=0.5))
    assert not any(w.any() for w in post.weights.values())
