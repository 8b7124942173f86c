"""Which weights of a trained network are normalised (Definition 1), found by probing and certified.

A group θ'' is normalised if f(θ' + kθ'') = f(θ' + θ'') for every k > 0. Its scale is then arbitrary, and a
prior must
not tie it to anything else (Recommendation 2). No layer is recognised by its name or its type:

    idealised   f without the epsilons that blur the symmetry, with batch instead of running statistics
    probe       f and its gradients on a few rows, in float64
    nullspace   scalings of tensors that leave f as it is, to first order: a null space and its sparse vectors
    certificate the finite check of each of them, and the statistics that scale along
    search      the order in which groups are looked for
    found       what comes out, and a copy of the network at another scale
"""

from linlap.symmetry.found import NormalisedGroup, Rescaling, Symmetries, rescaled
from linlap.symmetry.search import detect

__all__ = ["NormalisedGroup", "Rescaling", "Symmetries", "detect", "rescaled"]
