"""Non-negative least squares on normal equations, for a dozen unknowns, in plain Python: Lawson and Hanson's active set
method (Solving Least Squares Problems, 1974, chapter 23), started from the unknowns that were positive in the previous
solution, so that most solutions take one elimination. Coordinate descent stops short for nearly collinear terms."""

from __future__ import annotations

Matrix = list[list[float]]

TOLERANCE = 1e-9
MOST_CHANGES = 40
"""Maximum number of changes to the active set: many times what a dozen unknowns need, so that rounding errors cannot
cause an endless loop."""


def non_negative_solution(normal: Matrix, right: list[float], start: list[float]) -> list[float]:
    """Return the x >= 0 that minimizes x @ normal @ x / 2 - right @ x, for a symmetric and positive definite `normal`.
    The search begins with the unknowns that are positive in `start`, the solution of a similar problem, to be fast."""
    count = len(right)
    free = {i for i in range(count) if start[i] > 0}
    x = [0.0] * count
    for _ in range(MOST_CHANGES):
        x = _advance(normal, right, free, x)
        slack = [right[i] - sum(map(float.__mul__, normal[i], x)) for i in range(count)]
        wanted = max((i for i in range(count) if i not in free), key=lambda i: slack[i], default=None)
        if wanted is None or slack[wanted] <= TOLERANCE * max(1.0, abs(right[wanted])):
            break
        free.add(wanted)
    return x


def _advance(normal: Matrix, right: list[float], free: set[int], x: list[float]) -> list[float]:
    """One round of the active-set method: return the x that solves the normal equations in the `free` unknowns, with
    all others 0, approached from the feasible x. Unknowns that would become negative are set to 0 and removed from
    `free` in place."""
    while free:
        order = sorted(free)
        target = dict(zip(order, eliminate(normal, right, order), strict=True))
        blocking = [i for i in order if target[i] <= 0]
        if not blocking:
            return [target.get(i, 0.0) for i in range(len(x))]
        step = min(x[i] / (x[i] - target[i]) if x[i] > target[i] else 0.0 for i in blocking)
        x = [x[i] + step * (target[i] - x[i]) if i in target else 0.0 for i in range(len(x))]
        free.difference_update([i for i in blocking if x[i] <= TOLERANCE] or blocking[:1])
    return [0.0] * len(x)


def eliminate(normal: Matrix, right: list[float], order: list[int]) -> list[float]:
    """Return the x with normal @ x = right, restricted to the rows and columns in `order`, in that order, by Gaussian
    elimination. The matrix is positive definite, so that no pivoting is needed."""
    rows = [[*(normal[i][j] for j in order), right[i]] for i in order]
    for k, pivot in enumerate(rows):
        for row in rows[k + 1 :]:
            factor = row[k] / pivot[k]
            if factor:
                row[k:] = [a - factor * b for a, b in zip(row[k:], pivot[k:], strict=True)]
    solution = [0.0] * len(order)
    for k in range(len(order) - 1, -1, -1):
        known = sum(map(float.__mul__, rows[k][k + 1 : -1], solution[k + 1 :]))
        solution[k] = (rows[k][-1] - known) / rows[k][k]
    return solution
