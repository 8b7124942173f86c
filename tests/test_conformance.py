"""The public conformance suite passes on what we ship, and catches what is wrong."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import linlap as ll
from linlap import testing
from linlap.curvature.base import Cost, Curvature
from linlap.curvature.dense import Dense, DenseCurvature, DenseFactor
from linlap.curvature.dual import Dual
from linlap.errors import ConformanceError, LinlapError


@pytest.mark.parametrize("structure", [Dense(), Dual()], ids=lambda s: s.name)
def test_shipped_structures_conform(structure):
    run = ll.testing.check_curvature(structure)
    assert len(run) == len(set(run)) == 5 * len(testing.CHECKS)


def test_every_check_states_its_identity_and_is_listed():
    assert len({check.__name__ for check in testing.CHECKS}) == len(testing.CHECKS) == 14
    assert all(check.__doc__ for check in testing.CHECKS)


def test_it_needs_no_pytest():
    code = "import linlap, sys; linlap.testing.CHECKS; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- deliberately wrong structures: each is caught, by the check of that name


def wrong(**changes):
    """Dense, with some methods of its factor replaced by `changes[name](factor, right, *arguments)`."""

    def method(name, change):
        right = getattr(DenseFactor, name)
        if isinstance(right, property):
            return property(lambda self: change(self, right.fget(self)))
        return lambda self, *arguments: change(self, right(self, *arguments), *arguments)

    factor_type = type("WrongFactor", (DenseFactor,), {name: method(name, change) for name, change in changes.items()})

    class WrongCurvature(DenseCurvature):
        def factor(self, prior, noise_precision):
            made = super().factor(prior, noise_precision)
            return factor_type(made.lower, made.scale, made.prior, made.noise_precision, made.sums)

        def at(self, outputs):
            return Wrong().of(self.problem, outputs)

    class Wrong(Dense):
        name = "wrong"

        def of(self, problem, outputs):
            made = super().of(problem, outputs)
            return WrongCurvature(made.problem, made.sums)

        def restored(self, tensors, linearised, setting):
            made = super().restored(tensors, linearised, setting)
            return factor_type(made.lower, made.scale, made.prior, made.noise_precision)

    return Wrong()


def scaled_gradient(_, right):
    return replace(right, gradient=right.gradient * 1.001)


def scaled_hessian(_, right):
    return replace(right, hessian=right.hessian * 1.001)


WRONG = {
    "log_determinant": ({"log_determinant": lambda _, right: right + 1e-3}, "exact: log_determinant"),
    "solve": ({"solve": lambda _, right, v: right + 1e-4 * v}, "between 0 and 1"),
    "gradient": ({"sensitivities": scaled_gradient}, "−gradient"),
    "hessian": ({"sensitivities": scaled_hessian}, "hessian = ∂ gradient"),
    "dimensions": ({"effective_dimensions": lambda _, right: right * 1.001}, "1 − Λ_j Σ_jj"),
    "whiten": ({"whiten": lambda _, right, rows: right * 1.001}, "whiten(A)"),
    "covariance": ({"covariance": lambda _, right, j: right * 1.001}, "covariance(J) = J_nΣJ_nᵀ"),
    "variance": ({"variance": lambda _, right, j: right * 1.001}, "variance(J)"),
    "joint": ({"joint_covariance": lambda _, right, j: right * 1.001}, "joint_covariance(J)"),
    "sample": ({"sample": lambda _, right, n, g: right * 1.1}, "draws of covariance Σ"),
    "biased": ({"sample": lambda s, right, n, g: right + 0.2 * s.dense().diagonal().sqrt()}, "draws of mean 0"),
    "random": ({"sample": lambda s, right, n, g: right + 1e-9 * torch.rand(())}, "the same draws"),
    "shape": ({"solve": lambda _, right, v: right.reshape(len(v), -1)}, "solve(v) = Σv"),
    "lost": ({"tensors": lambda _, right: right | {"scale": right["scale"] * 1.5}}, "bit for bit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_factor_is_caught(name):
    changes, identity = WRONG[name]
    with pytest.raises(ConformanceError, match=re.escape(identity)) as caught:
        testing.check_curvature(wrong(**changes))
    assert re.search(
        "must satisfy.*but for 'wrong' on the problem 'gaussian'.*: compare with the interface", str(caught.value)
    )
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, LinlapError)


def diagonal_only(exact):
    """H without its off-diagonal: consistent with itself, but not exact."""

    class Approximate(DenseCurvature):
        pass

    Approximate.exact = exact

    class DiagonalOnly(Dense):
        name = "diagonal only"

        def of(self, problem, outputs):
            made = super().of(problem, outputs)
            return Moving(made.problem, torch.diag_embed(made.diagonal()))

    class Moving(Approximate):
        def at(self, outputs):
            return DiagonalOnly().of(self.problem, outputs)

    return DiagonalOnly()


def test_an_approximation_conforms_with_itself_unless_it_says_exact():
    testing.check_curvature(diagonal_only(exact=False))
    with pytest.raises(ConformanceError, match="exact: Σ"):
        testing.check_curvature(diagonal_only(exact=True))


class Stuck(Dense):
    """`at` forgets to move W."""

    name = "stuck"

    def of(self, problem, outputs):
        made = super().of(problem, outputs)
        return StuckCurvature(made.problem, made.sums)


class StuckCurvature(DenseCurvature):
    def at(self, outputs) -> Curvature:
        return self


class Free(Dense):
    """It claims to cost nothing."""

    name = "free"

    def cost(self, examples, outputs, weights, precisions):
        return Cost(0, 0)


class Halved(Dense):
    """Its diagonal is not that of H."""

    name = "halved"

    def of(self, problem, outputs):
        made = super().of(problem, outputs)
        return HalvedCurvature(made.problem, made.sums)


class HalvedCurvature(DenseCurvature):
    def diagonal(self):
        return super().diagonal() / 2


@pytest.mark.parametrize(
    ("structure", "identity"),
    [(Stuck(), "at(outputs)"), (Free(), "positive cost"), (Halved(), "diagonal() = ")],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_wrong_structure_is_caught(structure, identity):
    with pytest.raises(ConformanceError, match=re.escape(identity)):
        testing.check_curvature(structure)


def test_the_tolerance_is_the_callers():
    off = wrong(log_determinant=lambda _, right: right * (1 + 1e-4))
    testing.check_curvature(off, tolerance=1e-3, checks=[testing.log_determinant])
    with pytest.raises(ConformanceError, match="off by"):
        testing.check_curvature(off, checks=[testing.log_determinant])
