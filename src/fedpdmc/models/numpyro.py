"""NumPyro models as potentials: the one place where NumPyro is imported."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import compute_log_probs

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.warnings import warn
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import UserModel, rejoin, take_apart
from fedpdmc.validation import one_of

CALL = "from_numpyro(model)"
PARTS = ("likelihood", "prior", "joint")


@dataclasses.dataclass(frozen=True)
class Latent:
    """A latent variable of a model: its name, its unconstrained shape and whether it is unconstrained already."""

    name: str
    shape: tuple[int, ...]
    real: bool

    @property
    def size(self) -> int:
        """Number of unconstrained coordinates."""
        return math.prod(self.shape)

    @property
    def coordinates(self) -> list[str]:
        """Names of the coordinates, such as ``beta[0]``, or ``tau_unconstrained`` if the variable is a function of it."""
        name = self.name if self.real else f"{self.name}_unconstrained"
        if not self.shape:
            return [name]
        return [f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(self.shape)]


@dataclasses.dataclass(frozen=True)
class Part:
    """Minus the log of one part of a model's density in unconstrained coordinates.

    With ``θ = T(x)`` the variables: the likelihood is ``−log p(y | T(x))``, the prior ``−log p(T(x)) − log|det T'(x)|``.
    Only the log probabilities of that part are computed. With local variables z the likelihood is that of both,
    ``−log p(y | θ, T(z)) − log p(T(z) | θ) − log|det T'(z)|``; z comes after x.
    """

    model: Callable
    part: str
    latents: tuple[Latent, ...]
    observed: tuple[str, ...]
    rest: tuple[Any, ...]
    structure: Any
    local: tuple[Latent, ...] = ()

    def __call__(self, x, arrays):
        """Minus the log density."""
        if self.part != "joint":
            return self._one(self.part, x, arrays)
        return self._one("likelihood", x, arrays) + self._one("prior", x, arrays)

    def _one(self, part: str, x, arrays):
        """Minus the log of likelihood or prior. The variables lie in their supports by construction; this is not checked."""
        data = rejoin(arrays, self.rest, self.structure)
        # The prior of the others does not depend on local variables: they may take any value where they are not given.
        missing = sum(s.size for s in (*self.latents, *self.local)) - x.shape[0]
        loose = _unflatten((*self.latents, *self.local), jnp.concatenate([x, jnp.zeros(missing)]) if missing else x)
        model = handlers.substitute(self.model, substitute_fn=lambda site: _value(site, loose))
        own, others = (self.local, self.latents) if part == "likelihood" else (self.latents, self.local)
        hidden = [s.name for s in others] + ([] if part == "likelihood" else list(self.observed))
        with numpyro.validation_enabled(False) if own else contextlib.nullcontext():
            log_probs, trace = compute_log_probs(handlers.block(model, hide=hidden), *_arguments(data), {})
        total = -sum(log_probs.values(), jnp.zeros(()))
        return total - sum(_log_det(trace[s.name], loose[s.name]) for s in own if not s.real)


@dataclasses.dataclass(frozen=True, eq=False)
class Constrain:
    """The variables of a model as functions of its unconstrained coordinates."""

    model: Callable
    latents: tuple[Latent, ...]
    arrays: tuple[Any, ...]
    rest: tuple[Any, ...]
    structure: Any
    local: bool = False

    def __call__(self, x) -> dict[str, Any]:
        """Variables by name."""
        loose = _unflatten(self.latents, x)
        model = handlers.substitute(self.model, substitute_fn=lambda site: _value(site, loose))
        args, kwargs = _arguments(rejoin(self.arrays, self.rest, self.structure))
        trace = handlers.trace(handlers.seed(model, 0) if self.local else model).get_trace(*args, **kwargs)
        return {s.name: trace[s.name]["value"] for s in self.latents}


@double_precision
def from_numpyro(model: Callable, data: Any, part: str, local: Any = ()) -> UserModel:
    """See `fedpdmc.models.from_numpyro`."""
    if not callable(model):
        raise InputError(CALL, type(model).__name__, "Give a NumPyro model, a Python function.")
    one_of("from_numpyro(part)", part, PARTS)
    arrays, rest, structure = take_apart("from_numpyro(data)", data)
    args, kwargs = _arguments(rejoin(arrays, rest, structure))
    try:
        trace = handlers.trace(handlers.seed(model, 0)).get_trace(*args, **kwargs)
    except Exception as error:
        raise InputError(
            CALL,
            f"a model that raises {type(error).__name__} when called with the data: {error}",
            "Give the data as the model takes them: a tuple of arguments, a dict of keywords, or the one argument.",
        ) from error
    found, observed = _sites(trace)
    private = _local(local, found)
    latents = tuple(latent for latent in found if latent not in private)
    if not latents:
        raise InputError(CALL, "a model without latent variables", "Give a model with numpyro.sample sites to infer.")
    if part == "likelihood" and not observed:
        raise InputError(CALL, "a model without observations", "Give the observed data, or ask for part='prior'.")
    if part != "likelihood":
        _warn_of_horseshoe(trace, latents)
    names = tuple(name for latent in latents for name in latent.coordinates)
    constrain = Constrain(model, latents, arrays, rest, structure, bool(private))
    function = Part(model, part, latents, observed, rest, structure, private)
    hidden = () if part == "prior" else tuple(name for latent in private for name in latent.coordinates)
    return UserModel(function, () if part == "prior" and not arrays else arrays, len(names), names, constrain, hidden)


def _warn_of_horseshoe(trace, latents: tuple[Latent, ...]) -> None:
    """Say what to use instead of local and global scales with half-Cauchy priors."""
    heavy = [
        latent for latent in latents if type(_base(trace[latent.name]["fn"])).__name__ in ("HalfCauchy", "HalfStudentT")
    ]
    local = [latent for latent in heavy if latent.size > 1]
    if not local or len(heavy) < 2:
        return
    shown = ", ".join(repr(latent.name) for latent in heavy)
    warn(
        f"the scales {shown} have half-Cauchy priors, {local[0].size} of them in {local[0].name!r}, as a horseshoe has. If "
        "the records do not determine them the posterior is a funnel, and a run is long: minutes, or without an end in "
        "sight. For a horseshoe use prior=fedpdmc.models.horseshoe_prior(dim, scale), which draws the scales from their own "
        "laws, with a likelihood of the coefficients themselves. Else half-normal or log-normal priors are faster."
    )


def _base(law: Any) -> Any:
    """The distribution within those that only shape it."""
    while hasattr(law, "base_dist") and type(law).__name__ in (
        "ExpandedDistribution",
        "Independent",
        "MaskedDistribution",
    ):
        law = law.base_dist
    return law


def _local(told: Any, latents: tuple[Latent, ...]) -> tuple[Latent, ...]:
    """The variables that were named as local."""
    if isinstance(told, str) or not all(isinstance(name, str) for name in told):
        raise InputError("from_numpyro(local)", repr(told), "Give a list of names.")
    known = {latent.name: latent for latent in latents}
    stray = [name for name in told if name not in known]
    if stray:
        raise InputError("from_numpyro(local)", repr(stray[0]), f"The variables are {', '.join(known)}.")
    return tuple(known[name] for name in told)


def _arguments(data: Any) -> tuple[tuple, dict]:
    """A tuple holds positional arguments, a dict keywords; anything else is the one argument."""
    if isinstance(data, dict):
        return (), data
    return (tuple(data) if isinstance(data, tuple) else (data,)), {}


def _sites(trace) -> tuple[tuple[Latent, ...], tuple[str, ...]]:
    """The latent variables and the names of the observations; what has no density to sample from is refused."""
    latents, observed = [], []
    for name, site in trace.items():
        if site["type"] == "plate" and site["args"][1] is not None and site["args"][1] < site["args"][0]:
            raise InputError(
                CALL, f"plate {name!r}, which takes a subsample", "Use all records: remove subsample_size."
            )
        if site["type"] == "param":
            raise InputError(CALL, f"numpyro.param {name!r}", "Give it a prior with numpyro.sample, or fix its value.")
        if site["type"] != "sample":
            continue
        if site["is_observed"]:
            observed.append(name)
        elif site["fn"].support.is_discrete:
            raise InputError(
                CALL,
                f"the discrete latent variable {name!r}",
                "Sum it out: write the mixture with dist.MixtureSameFamily or a logsumexp.",
            )
        else:
            transform = biject_to(site["fn"].support)
            shape = jnp.shape(transform.inv(site["value"]))
            x = np.linspace(-1.5, 1.5, max(math.prod(shape), 1)).reshape(shape)
            same = jnp.shape(site["value"]) == shape and np.array_equal(np.asarray(transform(x)), x)
            latents.append(Latent(name, shape, bool(same)))
    return tuple(latents), tuple(observed)


def _unflatten(latents: tuple[Latent, ...], x) -> dict[str, jax.Array]:
    values, begin = {}, 0
    for latent in latents:
        values[latent.name] = x[begin : begin + latent.size].reshape(latent.shape)
        begin += latent.size
    return values


def _value(site, loose: dict[str, Any]):
    """The constrained value of a latent site; None leaves others alone."""
    if site["type"] != "sample" or site["name"] not in loose:
        return None
    return biject_to(site["fn"].support)(loose[site["name"]])


def _log_det(site, x):
    """``log|det T'(x)|`` summed over the batch."""
    return jnp.sum(biject_to(site["fn"].support).log_abs_det_jacobian(x, site["value"]))
