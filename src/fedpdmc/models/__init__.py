"""Models of a site's records, and priors."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import on_device
from fedpdmc._jax.precision import double_precision
from fedpdmc.enclosures import continuous as continuous
from fedpdmc.errors import InputError
from fedpdmc.models.families import *  # noqa: F403  # regressions of the standard library
from fedpdmc.models.grouped import check_counts as _check_counts
from fedpdmc.models.grouped import check_labels as _check_labels
from fedpdmc.models.grouped import effects_prior as effects_prior
from fedpdmc.models.grouped import events_of as _events_of
from fedpdmc.models.grouped import random_effects as random_effects
from fedpdmc.models.grouped import spread_prior as spread_prior
from fedpdmc.models.grouped import with_effects as with_effects
from fedpdmc.models.mixture_prior import horseshoe_prior as horseshoe_prior
from fedpdmc.models.mixture_prior import of_each as _of_each
from fedpdmc.models.mixture_prior import student_t_prior as student_t_prior
from fedpdmc.models.user_function import Minus, UserModel, user_model
from fedpdmc.potentials import (
    GaussianRecords,
    LinearPredictor,
    LinearUnknownScale,
    Logistic,
    Poisson,
    Potential,
    Quadratic,
    StudentT,
)
from fedpdmc.validation import finite_array, integer, positive, record_weights

# Residuals per parameter that are needed to estimate their scale, and the factor from one at which a warning is given.
LEAST_RESIDUALS, FAR_SCALE = 10, 5.0


def _design(X: Any, y: Any, call: str) -> tuple[np.ndarray, np.ndarray]:
    design = finite_array(f"{call}(X)", X, 2, "(n, d)")
    response = finite_array(f"{call}(y)", y, 1, "(n,)")
    if design.shape[1] == 0:
        raise InputError(f"{call}(X)", f"shape {design.shape}", "Give at least one column.")
    if design.shape[0] != response.shape[0]:
        raise InputError(
            f"{call}(y)",
            f"{response.shape[0]} responses for {design.shape[0]} rows of X",
            "Give one response for each row of X.",
        )
    return design, response


def _predictor(design, response, loss, offset=None, weight=None) -> LinearPredictor:
    offset, weight = (None if x is None else on_device(x) for x in (offset, weight))
    return LinearPredictor.from_records(on_device(design), on_device(response), loss, offset, weight)


def _weights(call: str, weights: Any, n: int) -> np.ndarray | None:
    return None if weights is None else record_weights(f"{call}(weights)", weights, n)


@double_precision
def normal_prior(dim: int, mean: Any = 0.0, scale: Any = 1.0, *, cov: Any = None, precision: Any = None) -> Quadratic:
    """A Gaussian prior ``N(mean, scale²)``, or with a full covariance or precision matrix.

    Parameters
    ----------
    dim : int
        Number of parameters.
    mean : float or array of shape (dim,)
    scale : float or array of shape (dim,)
        Standard deviations; left out when ``cov`` or ``precision`` is given.
    cov, precision : array of shape (dim, dim), optional
        At most one of them.
    """
    dim = integer("normal_prior(dim)", dim, 1, remedy="Give the number of parameters, an integer of at least 1.")
    if cov is not None and precision is not None:
        raise InputError("normal_prior(cov, precision)", "both", "Give one of them.")
    center = _of_each("normal_prior(mean)", mean, dim)
    if cov is None and precision is None:
        matrix = np.diag(_of_each("normal_prior(scale)", scale, dim, True) ** -2.0)
    else:
        name = "normal_prior(cov)" if precision is None else "normal_prior(precision)"
        matrix = _positive_definite(name, cov if precision is None else precision, dim)
        matrix = np.linalg.inv(matrix) if precision is None else matrix
    return Quadratic(on_device(matrix), on_device(-matrix @ center))


def _positive_definite(name: str, value: Any, dim: int) -> np.ndarray:
    matrix = finite_array(name, value, 2, f"({dim}, {dim})")
    if matrix.shape != (dim, dim):
        raise InputError(name, f"shape {matrix.shape}", f"Give an array of shape ({dim}, {dim}).")
    if not np.allclose(matrix, matrix.T, rtol=1e-10, atol=0):
        raise InputError(name, "a matrix that is not symmetric", "Give a symmetric matrix.")
    if np.linalg.eigvalsh(matrix)[0] <= 0:
        raise InputError(
            name, f"least eigenvalue {np.linalg.eigvalsh(matrix)[0]:.3g}", "Give a positive definite matrix."
        )
    return (matrix + matrix.T) / 2


@double_precision
def grid_prior(shape: tuple[int, int], alpha: float, beta: float) -> Quadratic:
    """The Gaussian field of the paper's Cox model: mean zero, precision ``β (I − α A)`` with ``A`` the grid's adjacency.

    Parameters
    ----------
    shape : (rows, columns)
    alpha, beta : float
        ``beta > 0``, and ``alpha`` small enough for a positive definite precision (below ¼ for any grid).
    """
    size = finite_array("grid_prior(shape)", shape, (0, 1), "(2,)")
    if size.shape != (2,) or np.any(size < 1) or np.any(size != np.round(size)):
        raise InputError("grid_prior(shape)", repr(shape), "Give (rows, columns), whole numbers of at least one.")
    rows, columns = (int(n) for n in size)
    coupling = float(finite_array("grid_prior(alpha)", alpha, 0, "()"))
    index = np.arange(rows * columns).reshape(rows, columns)
    adjacency = np.zeros((rows * columns, rows * columns))
    for one, other in ((index[:, :-1], index[:, 1:]), (index[:-1], index[1:])):
        adjacency[one.ravel(), other.ravel()] = adjacency[other.ravel(), one.ravel()] = 1.0
    matrix = positive("grid_prior(beta)", beta) * (np.eye(rows * columns) - coupling * adjacency)
    least = np.linalg.eigvalsh(matrix)[0]
    if not least > 0:
        raise InputError(
            "grid_prior(alpha)", repr(alpha), "The precision is not positive definite: give |alpha| below 1/4."
        )
    return Quadratic(jnp.asarray(matrix), jnp.zeros(rows * columns))


@double_precision
def gaussian_mean(y: Any, scale: Any = 1.0, weights: Any = None) -> Potential:
    """Records ``y_i ~ N(x, scale² I)`` with unknown mean x (paper, 6.1).

    Parameters
    ----------
    y : array of shape (n, d)
    scale : float or array of shape (d,)
    weights : array of shape (n,), optional
        By which the loss of each record is multiplied, as in all families (docs/regressions.md#weights).
    """
    records = finite_array("gaussian_mean(y)", y, 2, "(n, d)")
    if records.shape[1] == 0:
        raise InputError("gaussian_mean(y)", f"shape {records.shape}", "Give at least one column.")
    weight = _of_each("gaussian_mean(scale)", scale, records.shape[1], True) ** -2.0
    return Quadratic.of_records(
        GaussianRecords(None, records, weight, _weights("gaussian_mean", weights, len(records)))
    )


@double_precision
def linear(X: Any, y: Any, scale: float | None = None, weights: Any = None) -> Potential:
    """Linear regression ``y_i ~ N(ξ_i·x, σ²)``.

    Unless ``scale`` gives it, σ is unknown, and ``log σ`` is one more parameter, the last. Under a flat prior the posterior
    is the conjugate one, with ``x | y`` multivariate t of n − d degrees of freedom. Records enter through their number n
    and the triangular T of ``[X y] = QT``: ``U(x, s) = n s + ½ e^{−2s} |T (x, −1)|²``, whose cost does not grow with n.

    Parameters
    ----------
    X : array of shape (n, d)
    y : array of shape (n,)
    scale : float, optional
        A known σ: the parameters are then the d coefficients alone.
    weights : array of shape (n,), optional
        Their sum takes the place of n.
    """
    design, response = _design(X, y, "linear")
    share = _weights("linear", weights, len(response))
    if scale is None:
        return LinearUnknownScale.of_records(design, response, share)
    weight = positive("linear(scale)", scale) ** -2.0
    return Quadratic.of_records(GaussianRecords(design, response, weight, share))


@double_precision
def logistic(X: Any, y: Any, trials: Any = None, weights: Any = None) -> Potential:
    """Logistic regression ``y_i ~ Bernoulli(1/(1 + e^{−ξ_i·x}))`` (paper, 6.2), or ``y_i ~ Binomial(n_i, …)``.

    ``n_i`` trials with ``y_i`` events have the loss ``n_i log(1 + e^z) − y_i z``: that of a record with the response
    ``y_i/n_i`` and the weight ``n_i``.

    Parameters
    ----------
    X : array of shape (n, d)
    y : array of shape (n,), zeros and ones; with trials numbers of events
    trials, weights : array of shape (n,), optional
    """
    design, response = _design(X, y, "logistic")
    share = _weights("logistic", weights, len(response))
    if trials is not None:
        response, number = _events_of("logistic", response, trials)
        return _predictor(design, response, Logistic(), weight=number if share is None else number * share)
    _check_labels("logistic", response)
    return _predictor(design, response, Logistic(), weight=share)


@double_precision
def poisson(X: Any, y: Any, offset: Any = None, exposure: Any = None, weights: Any = None) -> Potential:
    """Poisson regression ``y_i ~ Poisson(exposure_i e^{ξ_i·x + offset_i})``: exposures are times at risk, and logged."""
    design, response = _design(X, y, "poisson")
    added = None
    for name, given in (("offset", offset), ("exposure", exposure)):
        if given is None:
            continue
        values = finite_array(f"poisson({name})", given, 1, "(n,)")
        if values.shape != response.shape:
            raise InputError(
                f"poisson({name})", f"shape {values.shape}", f"Give one for each record: shape {response.shape}."
            )
        if name == "exposure" and not (values > 0).all():
            where = int(np.argmin(values))
            raise InputError("poisson(exposure)", f"{values[where]} at index {where}", "Give positive numbers.")
        added = (0.0 if added is None else added) + (values if name == "offset" else np.log(values))
    share = _weights("poisson", weights, len(response))
    _check_counts("poisson(y)", response)
    return _predictor(design, response, Poisson(), added, share)


@double_precision
def student_t(X: Any, y: Any, df: float, scale: float = 1.0, weights: Any = None) -> Potential:
    """Regression with Student-t noise: ``(y_i − ξ_i·x)/scale ~ t_df``, both ``df`` and ``scale`` known.

    Parameters
    ----------
    X : array of shape (n, d)
    y : array of shape (n,)
    df, scale : float
        Not estimated. If the default scale of one is far from that of the residuals, a warning is given. For an unknown
        scale write the model as a function: see docs/models.md.
    weights : array of shape (n,), optional
    """
    design, response = _design(X, y, "student_t")
    loss = StudentT(jnp.asarray(positive("student_t(df)", df)), jnp.asarray(positive("student_t(scale)", scale)))
    _warn_of_unit_scale(design, response, float(scale))
    return _predictor(design, response, loss, weight=_weights("student_t", weights, len(response)))


def _warn_of_unit_scale(design: np.ndarray, response: np.ndarray, scale: float) -> None:
    """Warn if the default scale is far from that of the residuals of a least squares fit, by their median."""
    n, d = design.shape
    if scale != 1.0 or n < LEAST_RESIDUALS * d:
        return
    residual = response - design @ np.linalg.lstsq(design, response, rcond=None)[0]
    # Half of all t variables are within 0.67 (many degrees of freedom) to 1 (one of them) of zero.
    found = float(np.median(np.abs(residual)) / 0.8)
    if not 1 / FAR_SCALE < found < FAR_SCALE:
        warnings.warn(
            f"student_t(scale): it is fixed at 1, and the residuals have a scale of about {found:.3g}. Give scale=.",
            stacklevel=4,
        )


@double_precision
def ar1_student_t(series: Any, df: float, scale: float = 1.0, weights: Any = None) -> Potential:
    """Autoregression ``Y_k = c + x Y_{k−1} + scale·t_df`` with parameters (x, c) (paper, 6.3).

    Parameters
    ----------
    series : array of shape (N, K+1)
        N trajectories, each with its starting value first.
    weights : array of shape (N,), optional
        Of the trajectories.
    """
    paths = finite_array("ar1_student_t(series)", series, 2, "(N, K+1)")
    if paths.shape[1] < 2:
        raise InputError("ar1_student_t(series)", f"shape {paths.shape}", "Give at least two points in each series.")
    before, after = paths[:, :-1].ravel(), paths[:, 1:].ravel()
    loss = StudentT(
        jnp.asarray(positive("ar1_student_t(df)", df)), jnp.asarray(positive("ar1_student_t(scale)", scale))
    )
    share = _weights("ar1_student_t", weights, len(paths))
    share = None if share is None else np.repeat(share, paths.shape[1] - 1)
    predictor = _predictor(np.stack([before, np.ones_like(before)], 1), after, loss, weight=share)
    return dataclasses.replace(predictor, series=paths.shape[1] - 1)


@double_precision
def log_gaussian_cox(counts: Any) -> Potential:
    """The cells of a log-Gaussian Cox grid that a site owns: ``y_k ~ Poisson(e^{x_k})`` (paper, appendix).

    Parameters
    ----------
    counts : array of any shape
        Counts of the cells, flattened in C order; give `Site` the cells' ``coordinates`` in the same order.
    """
    cells = finite_array("log_gaussian_cox(counts)", counts, (1, 2), "(cells,) or (rows, columns)").ravel()
    if not cells.size:
        raise InputError("log_gaussian_cox(counts)", "no cells", "Give at least one cell.")
    _check_counts("log_gaussian_cox(counts)", cells)
    return _predictor(np.ones(cells.size), cells, Poisson())


def from_logdensity(f: Callable, data: Any = None) -> UserModel:
    """A site's model from its log likelihood, a JAX function ``f(x, data)`` as BlackJAX users write it.

    Parameters
    ----------
    f : callable
        Of the parameters, an array of shape (d,), and the data; without data it is called as ``f(x)``. It returns a number,
        the log density up to a constant. A prior that it includes counts once for every site that has it: keep the prior
        apart, or give it to one site only.
    data : pytree of arrays, optional
        Floating ones are taken to 64 bits.
    """
    if not callable(f):
        raise InputError("from_logdensity(f)", type(f).__name__, "Give a JAX function f(x, data).")
    model = user_model(f, data)
    return dataclasses.replace(model, function=Minus(model.function))


def from_numpyro(model: Callable, data: Any = (), *, part: str = "likelihood", local: Any = ()) -> UserModel:
    """A part of a NumPyro model as a potential of its unconstrained coordinates.

    With ``θ = T(x)`` the latent variables, ``"likelihood"`` is ``−log p(y | T(x))``, the sites with ``obs`` and the factors,
    ``"prior"`` is ``−log p(T(x)) − log|det T'(x)|``, and ``"joint"`` their sum, NumPyro's own potential energy. In a
    federation every site has the likelihood of its records, and the prior counts once:

    ``fp.sample([fp.Site(from_numpyro(model, d), name=...) for d in ...], prior=from_numpyro(model, data, part="prior"))``

    Coordinates are named after the variables, such as ``beta[0]``, or ``tau_unconstrained`` where the variable is a function
    of the coordinate. `Posterior.summary`, `Posterior.variables` and `Posterior.to_arviz` show the variables themselves.

    Parameters
    ----------
    model : callable
        A NumPyro model with continuous latent variables and without subsampling.
    data : tuple, dict or anything else
        What the model is called with: positional arguments, keywords, or its one argument. Arrays are taken to 64 bits,
        everything else reaches the model as it is.
    part : {"likelihood", "prior", "joint"}
    local : sequence of str
        Variables that are private latents of each site, such as the effects of its wards. Their density given the other
        variables belongs to the likelihood; the prior leaves them out. Their number may differ from site to site.
    """
    try:
        from fedpdmc.models import numpyro
    except ImportError as error:
        raise InputError("from_numpyro(model)", "no NumPyro", "Install it: pip install 'fedpdmc[numpyro]'.") from error
    return numpyro.from_numpyro(model, data, part, local)
