"""Linear algebra of scalings: exponents a with Σ_g a_g v_g = 0.

Here v_g = J(P_g θ̃) is the response of f to θ_g → k θ_g. Then f is, to first order, invariant to
θ_g → k^{a_g} θ_g. Exponents are dimensionless, so that a sparse vector of small integers names a symmetry.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse.csgraph import connected_components

INTEGRAL = 1e-4  # the distance from an integer within which an exponent is one
LINKED = 1e-6  # the entry of the projector above which two tensors share a symmetry


def null_space(responses: np.ndarray, natural: np.ndarray, tolerance: float) -> np.ndarray:
    """Orthonormal exponents `[G, d]` with responses @ exponents = 0, from responses `[E, G]`.

    Rows are scaled to one length, columns too, but to no less than a small part of their `natural` size
    `[E, G]`, so that rounding is not taken for a response.
    """
    lengths = np.linalg.norm(natural, axis=1, keepdims=True)
    rows = responses / np.where(lengths > 0, lengths, 1)
    floor = tolerance * np.linalg.norm(natural / np.where(lengths > 0, lengths, 1), axis=0)
    columns = np.maximum(np.linalg.norm(rows, axis=0), np.maximum(floor, np.finfo(float).tiny))
    _, singular, right = np.linalg.svd(rows / columns, full_matrices=True)
    rank = int((singular > tolerance * max(1.0, singular.max(initial=0.0))).sum())
    exponents = right[rank:].T / columns[:, None]
    return np.linalg.qr(exponents / np.linalg.norm(exponents, axis=0))[0]


def common_scales(basis: np.ndarray) -> list[tuple[int, ...]]:
    """Sets of tensors with one common exponent: 0/1 vectors in the span of `basis` `[G, d]`, smallest first.

    For each tensor the smallest that contains it. Of two equally small ones that with the later tensors
    wins: the one written to a residual stream rather than the one before it.
    """
    found: set[tuple[int, ...]] = set()
    for tensors, part in direct_sum(basis):
        for g in range(len(tensors) if part.shape[1] > 1 else 1):
            exponents = _least_common(part, g)
            if exponents is not None and np.abs(exponents - exponents.round()).max() < INTEGRAL:
                found.add(tuple(tensors[np.flatnonzero(exponents.round())].tolist()))
    return sorted(found, key=lambda support: (len(support), support))


def sparse_vectors(basis: np.ndarray, known: np.ndarray) -> list[np.ndarray]:
    """Vectors `[G]` of least Σ|a_g| that add the span of `basis` `[G, d]` to that of `known` `[G, m]`."""
    found = []
    for tensors, part in direct_sum(basis):
        embedded = np.zeros((len(basis), part.shape[1]))
        embedded[tensors] = part
        target = _rank(np.hstack([known, embedded]))
        for g in range(len(tensors)):
            if _rank(known) == target:
                break
            exponents = np.zeros(len(basis))
            exponents[tensors] = _least_absolute(part, g)
            if _rank(np.column_stack([known, exponents])) > _rank(known):
                known = np.column_stack([known, exponents])
                found.append(exponents)
    return found


def direct_sum(basis: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The span of `basis` `[G, d]` as parts that share no tensor: tensors, and a basis on these, of each."""
    if not basis.size:
        return []
    orthonormal = np.linalg.qr(basis)[0]
    _, labels = connected_components(np.abs(orthonormal @ orthonormal.T) > LINKED)
    parts = []
    for label in range(labels.max() + 1):
        tensors = np.flatnonzero(labels == label)
        left, singular, _ = np.linalg.svd(orthonormal[tensors], full_matrices=False)
        if singular[0] > 0.5:  # they are all 0 or 1
            parts.append((tensors, left[:, singular > 0.5]))
    return parts


def _least_common(basis: np.ndarray, g: int) -> np.ndarray | None:
    """argmin Σ a_i over 0 ≤ a ≤ 1 in the span of `basis` with a_g = 1, by linear programming."""
    size, dimensions = basis.shape
    if dimensions == 1:
        exponents = basis[:, 0] / basis[g, 0]
        return exponents if exponents.min() > -INTEGRAL and exponents.max() < 1 + INTEGRAL else None
    later_first = 1 - 1e-3 * np.arange(size) / size
    solution = linprog(
        later_first @ basis,
        A_ub=np.vstack([-basis, basis]),
        b_ub=np.concatenate([np.zeros(size), np.ones(size)]),
        A_eq=basis[[g]],
        b_eq=[1.0],
        bounds=(None, None),
    )
    return basis @ solution.x if solution.status == 0 else None


def _least_absolute(basis: np.ndarray, g: int) -> np.ndarray:
    """argmin Σ|a_i| over a in the span of `basis` with a_g = 1, by linear programming."""
    size, dimensions = basis.shape
    if dimensions == 1:
        return basis[:, 0] / basis[g, 0]
    earlier_first = 1 + 1e-3 * np.arange(size) / size
    solution = linprog(
        np.concatenate([np.zeros(dimensions), earlier_first]),
        A_ub=np.block([[basis, -np.eye(size)], [-basis, -np.eye(size)]]),
        b_ub=np.zeros(2 * size),
        A_eq=np.concatenate([basis[g], np.zeros(size)])[None],
        b_eq=[1.0],
        bounds=(None, None),
    )
    return basis @ solution.x[:dimensions] if solution.status == 0 else np.zeros(size)


def _rank(vectors: np.ndarray) -> int:
    if not vectors.size:
        return 0
    lengths = np.linalg.norm(vectors, axis=0)
    return int(np.linalg.matrix_rank(vectors / np.where(lengths > 0, lengths, 1), tol=INTEGRAL))
