"""What scikit-learn computes of distributed arrays and of NumPy's: started by test_sklearn.py on several ranks.

Prints JSON on rank 0: for each case "equal", or what went wrong.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn import (
    config_context,
    decomposition,
    discriminant_analysis,
    kernel_approximation,
    linear_model,
    metrics,
    mixture,
    model_selection,
    naive_bayes,
    preprocessing,
    utils,
)
from sklearn.metrics import pairwise
from sklearn.pipeline import make_pipeline

import parlinalg as pla

RNG = np.random.default_rng(0)
X, OTHER = RNG.standard_normal((23, 5)), RNG.standard_normal((7, 5))
Y = X @ RNG.standard_normal(5) + 0.1 * RNG.standard_normal(23)
LABELS, CHANCES = RNG.integers(0, 3, 23), RNG.random((23, 3))
CHANCES /= CHANCES.sum(axis=1, keepdims=True)
GUESSED = np.where(RNG.random(23) < 0.7, LABELS, 0)
NEAR, POSITIVE, TWO = Y + X[:, 0], np.abs(Y) + 0.1, (LABELS > 0).astype(int)
Convert = Callable[[np.ndarray], Any]


def fitted(
    make: Callable[[], Any], *attributes: str, x: np.ndarray = X, y: Any = None, then: Any = ("transform",)
) -> Any:
    """A case that fits an estimator, and looks at its attributes and at what its methods make of x."""

    def case(convert: Convert) -> list[Any]:
        model = make().fit(convert(x)) if y is None else make().fit(convert(x), convert(y))
        return [getattr(model, a) for a in attributes] + [getattr(model, method)(convert(x)) for method in then]

    return case


def scored(function: Callable[..., Any], *arrays: np.ndarray, **options: Any) -> Any:
    """A case that calls a function of arrays."""

    def case(convert: Convert) -> Any:
        given = {k: convert(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
        return function(*map(convert, arrays), **given)

    return case


def encoded(convert: Convert) -> list[Any]:
    model = preprocessing.LabelEncoder().fit(convert(LABELS))
    return [model.classes_, model.transform(convert(LABELS)), model.inverse_transform(convert(LABELS))]


both, guess = ("transform", "inverse_transform"), ("predict",)
p, m = preprocessing, metrics
CASES: dict[str, Callable[[Convert], Any]] = {
    "StandardScaler": fitted(p.StandardScaler, "mean_", "scale_", then=both),
    "MinMaxScaler": fitted(p.MinMaxScaler, "data_min_", then=both),
    "MaxAbsScaler": fitted(p.MaxAbsScaler, "max_abs_", then=both),
    **{f"Normalizer {n}": fitted(lambda n=n: p.Normalizer(norm=n)) for n in ("l1", "l2", "max")},
    "Binarizer": fitted(p.Binarizer),
    "KernelCenterer": fitted(p.KernelCenterer, "K_fit_rows_", x=X @ X.T),
    "PolynomialFeatures": fitted(lambda: p.PolynomialFeatures(2)),
    "FunctionTransformer": fitted(p.FunctionTransformer),
    "LabelEncoder": encoded,
    "LabelBinarizer": lambda c: p.LabelBinarizer().fit_transform(c(LABELS)),
    "label_binarize": lambda c: p.label_binarize(c(LABELS), classes=[0, 1, 2]),
    "pipeline": lambda c: make_pipeline(p.StandardScaler(), p.MinMaxScaler()).fit_transform(c(X)),
    "check_array": lambda c: utils.check_array(c(X)),
    "train_test_split": lambda c: model_selection.train_test_split(c(X), c(Y), random_state=0),
    "cross_val_predict": lambda c: model_selection.cross_val_predict(naive_bayes.GaussianNB(), c(X), c(LABELS)),
    "cross_val_score": lambda c: model_selection.cross_val_score(naive_bayes.GaussianNB(), c(X), c(LABELS)),
    "GaussianNB": fitted(naive_bayes.GaussianNB, "theta_", "var_", y=LABELS, then=("predict", "predict_proba")),
    "LogisticRegression": fitted(linear_model.LogisticRegression, "coef_", y=LABELS, then=guess),
    "PoissonRegressor": fitted(linear_model.PoissonRegressor, "coef_", y=POSITIVE, then=guess),
    "GaussianMixture diag": fitted(
        lambda: mixture.GaussianMixture(2, covariance_type="diag", init_params="random_from_data", random_state=0),
        "means_", then=guess),
    # These need functions of `linalg`.
    "PCA full": fitted(lambda: decomposition.PCA(2, svd_solver="full"), "components_"),
    "PCA covariance_eigh": fitted(lambda: decomposition.PCA(2, svd_solver="covariance_eigh"), "components_"),
    "PCA randomized": fitted(lambda: decomposition.PCA(
        2, svd_solver="randomized", power_iteration_normalizer="QR", random_state=0), "components_"),
    "Ridge": fitted(lambda: linear_model.Ridge(solver="svd"), "coef_", y=Y, then=guess),
    "RidgeCV": fitted(linear_model.RidgeCV, "coef_", y=Y, then=guess),
    "RidgeClassifier": fitted(lambda: linear_model.RidgeClassifier(solver="svd"), "coef_", y=LABELS, then=guess),
    "LinearDiscriminantAnalysis": fitted(
        discriminant_analysis.LinearDiscriminantAnalysis, "coef_", y=LABELS, then=guess),
    "GaussianMixture full": fitted(
        lambda: mixture.GaussianMixture(2, init_params="random_from_data", random_state=0), "means_", then=guess),
    "Nystroem": fitted(lambda: kernel_approximation.Nystroem(n_components=4, random_state=0)),
    # Metrics
    **{name: scored(getattr(m, name), LABELS, GUESSED) for name in (
        "accuracy_score", "balanced_accuracy_score", "cohen_kappa_score", "confusion_matrix", "hamming_loss",
        "matthews_corrcoef", "multilabel_confusion_matrix", "precision_recall_fscore_support", "zero_one_loss")},
    **{name: scored(getattr(m, name), LABELS, GUESSED, average="macro") for name in (
        "f1_score", "jaccard_score", "precision_score", "recall_score")},
    "fbeta_score": scored(m.fbeta_score, LABELS, GUESSED, average="macro", beta=2.0),
    "accuracy_score, weighted": scored(m.accuracy_score, LABELS, GUESSED, sample_weight=POSITIVE),
    "log_loss": scored(m.log_loss, LABELS, CHANCES), "d2_log_loss_score": scored(m.d2_log_loss_score, LABELS, CHANCES),
    **{name: scored(getattr(m, name), TWO, CHANCES[:, 0]) for name in (
        "average_precision_score", "brier_score_loss", "d2_brier_score", "det_curve", "precision_recall_curve",
        "roc_auc_score", "roc_curve") if hasattr(m, name)},
    **{name: scored(getattr(m, name), Y, NEAR) for name in (
        "d2_absolute_error_score", "d2_pinball_score", "explained_variance_score", "max_error", "mean_absolute_error",
        "mean_absolute_percentage_error", "mean_pinball_loss", "mean_squared_error", "median_absolute_error",
        "r2_score", "root_mean_squared_error")},
    **{name: scored(getattr(m, name), POSITIVE, np.abs(NEAR) + 0.1) for name in (
        "d2_tweedie_score", "mean_gamma_deviance", "mean_poisson_deviance", "mean_squared_log_error",
        "root_mean_squared_log_error")},
    "mean_tweedie_deviance": scored(m.mean_tweedie_deviance, POSITIVE, np.abs(NEAR) + 0.1, power=1.5),
    "r2_score of columns": scored(m.r2_score, X, X + X**2, multioutput="raw_values"),
    "calinski_harabasz_score": scored(m.calinski_harabasz_score, X, LABELS),
    "davies_bouldin_score": scored(m.davies_bouldin_score, X, LABELS),
    "entropy": scored(m.cluster.entropy, LABELS),
    # Distances and kernels
    **{name: scored(getattr(pairwise, name), X, OTHER) for name in (
        "cosine_distances", "cosine_similarity", "euclidean_distances", "laplacian_kernel", "linear_kernel",
        "manhattan_distances", "pairwise_distances", "pairwise_distances_argmin", "polynomial_kernel", "rbf_kernel",
        "sigmoid_kernel")},
    **{name: scored(getattr(pairwise, name), X, X[::-1].copy()) for name in (
        "paired_cosine_distances", "paired_euclidean_distances", "paired_manhattan_distances")},
    **{name: scored(getattr(pairwise, name), np.abs(X), np.abs(OTHER)) for name in (
        "additive_chi2_kernel", "chi2_kernel")},
    "pairwise_kernels": scored(pairwise.pairwise_kernels, X, OTHER, metric="rbf"),
}  # fmt: skip


def answers(result: Any) -> list[np.ndarray]:
    return [np.asarray(pla.asnumpy(r)) for r in (result if isinstance(result, list | tuple) else [result])]


def outcome(case: Callable[[Convert], Any], grid: pla.Grid) -> str:
    """Compare what a case makes of distributed arrays, on a grid that is not the default one, and of NumPy's."""
    expected = answers(case(lambda a: a))
    try:
        found = answers(case(lambda a: pla.asarray(a, grid=grid)))
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "equal"


def main() -> None:
    world = pla.default_grid().world
    grid = pla.Grid({"a": world.size})
    with config_context(array_api_dispatch=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: outcome(case, grid) for name, case in CASES.items()}
    every = world.share(found)
    for theirs in every:
        if theirs != found:
            sys.exit(f"ranks find other outcomes: {found} and {theirs}")
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
