"""Calibrated error bars and a model evidence for a PyTorch network that is already trained."""

from linlap import errors
from linlap.curvature.base import Curvature, Factor, Structure
from linlap.features import Linearised, linearise
from linlap.fit import fit
from linlap.likelihood import Bernoulli, Categorical, Gaussian, Poisson
from linlap.paper import PaperSolver
from linlap.posterior import Posterior
from linlap.predictive import Predictive

__version__ = "0.1.0"

__all__ = [
    "Bernoulli",
    "Categorical",
    "Curvature",
    "Factor",
    "Gaussian",
    "Linearised",
    "PaperSolver",
    "Poisson",
    "Posterior",
    "Predictive",
    "Structure",
    "errors",
    "fit",
    "linearise",
]
