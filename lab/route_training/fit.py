"""Fits a learned router with scikit-learn, calibrates its probabilities, and measures them on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gateway.virtual_models.router import sigmoid, standardised

FOLDS = 5
LEAST_OF_EACH = 20
"""Minimum number of prompts for which the small member suffices, and of those for which it does not."""
COMPONENTS = 256
"""Maximum number of principal components of the vectors that the regression uses. Further ones are noise."""
STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Inverse strengths of the L2 penalty, of which cross-validation chooses one."""
BINS = 10
INSTALL = "training a router needs scikit-learn; install it with: pip install 'loralane[route]'"

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Fitted(Struct, frozen=True):
    """A logistic regression over standardised features, [num_features] each."""

    mean: Floats
    scale: Floats
    weights: Floats
    intercept: float

    def probabilities(self, rows: Floats) -> Floats:
        """Return the probability that the small member suffices for each row of features, as `LearnedRouter` does."""
        scores = standardised(rows, self.mean, self.scale) @ self.weights + self.intercept
        return np.array([sigmoid(score) for score in scores])


class Quality(Struct, frozen=True):
    """Measures of how well a router's probabilities predict whether the small member suffices."""

    brier: float
    """Mean squared error."""
    brier_constant: float
    """The same if every probability were the share of prompts for which the small member suffices."""
    ece: float
    """Expected calibration error over BINS bins of equal size."""
    auc: float
    """Chance that a prompt for which it suffices gets a higher probability than one for which it does not."""


def check_labels(suffices: Bools) -> None:
    """Raise ValueError if fewer than LEAST_OF_EACH prompts are among those for which the small member suffices, or
    among the others."""
    good = int(suffices.sum())
    for count, what in ((good, "suffices"), (len(suffices) - good, "does not suffice")):
        if count < LEAST_OF_EACH:
            raise ValueError(f"the small member {what} for {count} of the prompts; {LEAST_OF_EACH} are needed at least")


def fit(rows: Floats, suffices: Bools, num_text: int, seed: int) -> Fitted:
    """Fit a router, and calibrate it by Platt scaling on the scores of held-out folds; the scaling is merged into its
    weights.

    Args:
        rows: features, [n, num_features]: those of the text first.
        suffices: whether the small member suffices, [n].
        num_text: number of text features.
        seed: seed of the folds.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # threads would spend most of the time waiting for one another
        return _fit(rows, suffices, num_text, seed)


def _fit(rows: Floats, suffices: Bools, num_text: int, seed: int) -> Fitted:
    from sklearn.linear_model import LogisticRegression

    mean, deviation = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(deviation > 1e-9, deviation, 1.0)
    standard = standardised(rows, mean, scale)
    projection = _projection(standard[:, num_text:])
    reduced = np.hstack((standard[:, :num_text], standard[:, num_text:] @ projection))
    model, scores = _best(reduced, suffices, seed)
    platt = LogisticRegression(C=1e3).fit(scores[:, None], suffices)
    slope, offset = float(platt.coef_[0, 0]), float(platt.intercept_[0])
    weights = slope * model.coef_[0]
    spread = np.concatenate((weights[:num_text], projection @ weights[num_text:]))
    return Fitted(mean, scale, spread, slope * float(model.intercept_[0]) + offset)


def held_out(
    rows: Floats, suffices: Bools, num_text: int, seed: int, on_fold: Callable[[], None] = lambda: None
) -> Floats:
    """Return for each row the probability by a router that was fitted to the other folds, [n]."""
    from sklearn.model_selection import StratifiedKFold

    chances = np.empty(len(rows))
    for known, unseen in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(rows, suffices):
        chances[unseen] = fit(rows[known], suffices[known], num_text, seed).probabilities(rows[unseen])
        on_fold()
    return chances


def quality(probabilities: Floats, suffices: Bools) -> Quality:
    from sklearn.metrics import roc_auc_score

    share = suffices.mean()
    brier = float(np.mean((probabilities - suffices) ** 2))
    return Quality(
        brier, float(share * (1 - share)), ece(probabilities, suffices), float(roc_auc_score(suffices, probabilities))
    )


def ece(probabilities: Floats, suffices: Bools) -> float:
    return sum(weight * abs(said - true) for said, true, weight in reliability(probabilities, suffices))


def reliability(probabilities: Floats, suffices: Bools) -> list[tuple[float, float, float]]:
    """Return for BINS bins of prompts, in order of probability: the mean probability, the share for which the small
    member suffices, and the share of all prompts in the bin."""
    order = np.argsort(probabilities, kind="stable")
    bins = [part for part in np.array_split(order, BINS) if len(part)]
    return [(float(probabilities[part].mean()), float(suffices[part].mean()), len(part) / len(order)) for part in bins]


def _projection(standard: Floats) -> Floats:
    """Return a projection of rows to their principal components, [num_columns, num_components]. Directions are scaled
    to the square root of their standard deviation, relative to the largest, so that the L2 penalty shrinks small ones
    less."""
    count = min(COMPONENTS, len(standard) - 1, standard.shape[1])
    if not count:
        return np.zeros((standard.shape[1], 0))
    _, sizes, directions = np.linalg.svd(standard - standard.mean(axis=0), full_matrices=False)
    largest = max(float(sizes[0]), 1e-9)
    return directions[:count].T * np.sqrt(len(standard) / (largest * np.maximum(sizes[:count], 1e-9 * largest)))


def _best(rows: Floats, suffices: Bools, seed: int) -> tuple[Any, Floats]:
    """Choose the L2 penalty with the least log loss in cross-validation. Return a regression with this penalty, fitted
    to all rows, and the score of each row by the regression that its fold was held out from, [n]."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    tried = []
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=500)
        scores = cross_val_predict(model, rows, suffices, cv=folds, method="decision_function")
        chances = np.array([sigmoid(score) for score in scores])
        tried.append((log_loss(suffices, chances), strength, scores))
    _, strength, scores = min(tried, key=lambda attempt: attempt[0])
    return LogisticRegression(C=strength, max_iter=500).fit(rows, suffices), scores
