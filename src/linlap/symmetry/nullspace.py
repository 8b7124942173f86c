"""Linear algebra of scalings: exponents a with Σ_g a_g v_g = 0, where v_g = J(P_g θ̃) is the response of f to θ_g → k θ_g.

Then f is, to first order, invariant to θ_g → k^{a_g} θ_g. Exponents are dimensionless, so that a sparse vector of
small integers names a symmetry.
"""

import numpy as np
from scipy.optimize import linprog

INTEGRAL = 1e-4


def null_space(responses: np.ndarray, natural: np.ndarray, tolerance: float) -> np.ndarray:
    """Orthonormal exponents `[G, d]` with responses @ exponents = 0, from responses `[E, G]`.

    Rows are scaled to one length, columns too, but to no less than a small part of their `natural` size `[E, G]`, so
    that rounding is not taken for a response.
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

    For each tensor, the smallest non-negative vector that contains it. Of two equally small ones that with the later
    tensors wins: the one written to a residual stream rather than the one before it.
    """
    later_first = 1 - 1e-3 * np.arange(len(basis)) / max(len(basis), 1)
    found = set()
    for g in _free(basis):
        solution = linprog(
            later_first @ basis,
            A_ub=np.vstack([-basis, basis]),
            b_ub=np.concatenate([np.zeros(len(basis)), np.ones(len(basis))]),
            A_eq=basis[[g]],
            b_eq=[1.0],
            bounds=(None, None),
        )
        if solution.status == 0:
            exponents = basis @ solution.x
            if np.abs(exponents - exponents.round()).max() < INTEGRAL:
                found.add(tuple(np.flatnonzero(exponents.round()).tolist()))
    return sorted(found, key=lambda support: (len(support), support))


def sparse_vectors(basis: np.ndarray, known: np.ndarray) -> list[np.ndarray]:
    """Vectors `[G]` of least absolute sum that, with those `known` `[G, m]`, span what `basis` `[G, d]` and they do."""
    target = _rank(np.hstack([known, basis]))
    found = []
    for g in _free(basis):
        if _rank(known) == target:
            break
        exponents = _least_absolute(basis, g)
        if exponents is not None and _rank(np.column_stack([known, exponents])) > _rank(known):
            known = np.column_stack([known, exponents])
            found.append(exponents)
    return found


def _least_absolute(basis: np.ndarray, g: int) -> np.ndarray | None:
    """argmin Σ|a_i| over a in the span of `basis` with a_g = 1, by linear programming."""
    size, dimensions = basis.shape
    earlier_first = 1 + 1e-3 * np.arange(size) / size
    solution = linprog(
        np.concatenate([np.zeros(dimensions), earlier_first]),
        A_ub=np.block([[basis, -np.eye(size)], [-basis, -np.eye(size)]]),
        b_ub=np.zeros(2 * size),
        A_eq=np.concatenate([basis[g], np.zeros(size)])[None],
        b_eq=[1.0],
        bounds=(None, None),
    )
    return basis @ solution.x[:dimensions] if solution.status == 0 else None


def _free(basis: np.ndarray) -> list[int]:
    """The tensors that take part in any symmetry."""
    return np.flatnonzero(np.linalg.norm(basis, axis=1) > INTEGRAL).tolist() if basis.size else []


def _rank(vectors: np.ndarray) -> int:
    if not vectors.size:
        return 0
    lengths = np.linalg.norm(vectors, axis=0)
    return int(np.linalg.matrix_rank(vectors / np.where(lengths > 0, lengths, 1), tol=INTEGRAL))
