"""Calibrated error bars and a model evidence for a PyTorch network that is already trained."""

from linlap import errors, testing
from linlap.curvature.base import Curvature, Factor, Structure
from linlap.features import Linearised, linearise
from linlap.fit import fit
from linlap.inspection import Inspection, inspect
from linlap.likelihood import Bernoulli, Categorical, Gaussian, Poisson
from linlap.metrics import Comparison, Evaluation, compare, evaluate
from linlap.paper import PaperSolver
from linlap.posterior import Posterior
from linlap.predictive import Predictive
from linlap.store import load, save

__version__ = "0.1.0"

__all__ = [
    "Bernoulli",
    "Categorical",
    "Comparison",
    "Curvature",
    "Evaluation",
    "Factor",
    "Gaussian",
    "Inspection",
    "Linearised",
    "PaperSolver",
    "Poisson",
    "Posterior",
    "Predictive",
    "Structure",
    "compare",
    "errors",
    "evaluate",
    "fit",
    "inspect",
    "linearise",
    "load",
    "save",
    "testing",
]
