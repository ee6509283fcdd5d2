"""A site: the owner of records, which answers plans and reveals nothing else."""

from __future__ import annotations

import abc
import copy
import dataclasses
import hashlib
import os
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import on_device
from fedpdmc._jax.compilation_cache import use_compilation_cache
from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import ChainKeys, chain_keys
from fedpdmc.errors import InputError, PrivacyError
from fedpdmc.members.bounded_records import hold_file_to_bounds, hold_to_bounds
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.models.user_function import UserModel, derivatives_of, user_model
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import LatentPotential, Potential, RandomEffects, bare
from fedpdmc.potentials.padding import Padded
from fedpdmc.privacy.budget import Budget
from fedpdmc.validation import optional_seed
from fedpdmc.whitening import Bend, Reference

if TYPE_CHECKING:
    import pandas as pd


class Member(abc.ABC):
    """A site as `fedpdmc.sample` and `fedpdmc.laplace` see it."""

    name: str
    dim: int  # number of parameters that it depends on
    coordinates: np.ndarray | None  # the entries of the parameter vector that it depends on; all if None
    records: int  # zero if not disclosed
    budget: Any = None  # its privacy budget, if the site is in this process
    model: Any = None  # the user's own function, if its model is one and is in this process
    log: Any = None  # called with every plan and arrival of a site in this process
    bounds: Any = None  # the declared bounds of the records of a remote site whose derivatives are noisy
    # Names of its parameters (``names``) and the function from them to the variables that are reported
    # (``constrain``), in place of those of its model.
    naming: Any = None
    # The records' responses under draws (`fedpdmc.study.study_response.Responses`), for sites from a table.
    responses: Any = None
    latents: int = 0  # number of private latents of a site in this process; for a remote site 1 if it has any, else 0
    spreads: tuple[int, ...] = ()  # which of its parameters are log spreads of grouped effects
    federation: Any = None  # the federation through which a remote site is reached; None for a site in this process
    several_modes: bool = False  # whether the potential of a remote site may have several modes
    # Relative spacing of the derivatives that a remote site releases; zero if they are exact or noisy.
    grid: float = 0.0

    @property
    @abc.abstractmethod
    def noisy(self) -> bool:
        """Whether its derivatives are noisy and charged."""

    @abc.abstractmethod
    def derivatives(self, x: np.ndarray, spread: np.ndarray | None = None) -> tuple[float, np.ndarray, np.ndarray]:
        """``U_m``, ``∇U_m`` and ``∇²U_m`` at a point, or their means over ``N(x, S Sᵀ)`` with ``S = spread``."""

    def bent(self, bend: Bend | None) -> Member:
        """The same member as a function of coordinates before a bend; itself if it is None."""
        if bend is None:
            return self
        raise NotBent


class NotBent(Exception):
    """A member that is no function of bent coordinates."""


class DescribedSites(Sequence):
    """Sites that come with a prior: `fedpdmc.sites` makes them from a table and a formula."""

    prior: Any = None  # the prior that `fedpdmc.sample` uses if it is given no other
    prior_lines: Sequence[str] = ()  # the same in words, for every parameter
    # How their coefficients are read (`fedpdmc.results.forest_plot.EffectScale`).
    effect_scale: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class LatentPosterior:
    """Joint draws of a site's private latents and the shared parameters."""

    times: np.ndarray  # (n,): process times, the ends of blocks
    theta: np.ndarray  # (chains, n, d): the shared parameters
    z: np.ndarray  # (chains, n, k): the latents
    names: tuple[str, ...]  # names of the latents
    # (chains, k): the state of the latents at the last of these times, in the site's private coordinates: a saved run
    # continues from it. None if the site's store has it.
    last: np.ndarray | None = None

    def save(self, path: str | Path) -> Path:
        """Write everything to an NPZ file that only its owner can read."""
        path, parts = Path(path), {"times": self.times, "theta": self.theta, "z": self.z, "names": np.array(self.names)}
        parts |= {} if self.last is None else {"last": self.last}
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **parts)
        return path

    @classmethod
    def load(cls, path: str | Path) -> LatentPosterior:
        """Read a file written by `save`.

        Raises
        ------
        InputError
            Not such a file.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                parts = {name: file[name] for name in file.files}
            names = tuple(parts["names"].tolist())
            found = cls(parts["times"], parts["theta"], parts["z"], names, parts.get("last"))
            if found.z.shape != (*found.theta.shape[:2], len(names)) or len(found.times) != found.z.shape[1]:
                raise ValueError("arrays of inconsistent shapes")
        except (OSError, KeyError, ValueError, AttributeError, zipfile.BadZipFile) as error:
            raise InputError("path", f"{path}: {error}", "Give a file written by LatentPosterior.save.") from error
        return found

    def followed_by(self, later: LatentPosterior) -> LatentPosterior:
        """Joined with the draws of a run that continued from here."""
        times, theta = np.concatenate([self.times, later.times]), np.concatenate([self.theta, later.theta], 1)
        return LatentPosterior(times, theta, np.concatenate([self.z, later.z], 1), later.names, later.last)

    def summary(self) -> pd.DataFrame:
        """Mean, standard deviation and quantiles of each latent, as a pandas DataFrame."""
        import pandas as pd

        flat = self.z.reshape(-1, self.z.shape[-1])
        table = {"mean": flat.mean(0), "sd": flat.std(0, ddof=1)}
        table |= {f"{100 * q:g}%": np.quantile(flat, q, axis=0) for q in (0.025, 0.5, 0.975)}
        return pd.DataFrame(table, index=pd.Index(self.names, name="effect"))


use_compilation_cache()

SEED_BITS = 256  # of a seed from the operating system
NO_LATENT_BUDGET = (
    "There is no privacy bound: an arrival depends on the whole private history of the latents, whose law changes with a "
    "record too, so the sensitivity at fixed latents does not bound what an arrival reveals. Omit the budget or the latents."
)


class Site(Member):
    """One owner of data in a federation.

    Parameters
    ----------
    potential : Potential or callable
        The minus log likelihood of the site's records: from `fedpdmc.models`, or any JAX function ``f(x, data)`` that
        returns it, a number.
    name : str
        Unique within the federation.
    coordinates : sequence of int, optional
        The entries of the parameter vector that the site depends on, in the order in which its model takes them; all if
        None.
    data : optional
        Data for a potential given as a function, a pytree of arrays (floating ones are converted to 64 bits); without them
        the function is called as ``f(x)``. None of the models of `fedpdmc.models` needs it.
    latent : int, tuple of int or list of str, optional
        Private latents of a potential given as a function: how many, their shape, or their names. The function is then
        ``f(x, z, data)``, minus the log of the joint density of records and latents given x, of unconstrained z. The latents
        never leave the site, cost no message, and are read with `latent_posterior`.
    seed : int, optional
        The site's own secret seed: it then draws the same arrivals in this process and over a network. In process, None
        derives it from the run's seed and the site's name, or from the run's seed for all sites together.
    budget : Budget, optional
        The site's privacy budget: the site then accounts for what it reveals, and stops before the limit.
    log : callable, optional
        In process, ``log(plan, arrival)`` is called with every plan that the site receives and with its arrival, which is
        everything that passes between it and the coordinator, as NumPy arrays. Rounds are then run in Python, which is
        slower. Sites on a network keep an audit log on disk.

    Attributes
    ----------
    raw : Potential
        The potential as given; `potential` is that of the records within the budget's declared bounds.
    model : UserModel or None
        The user's function, if the potential is one. Until the number of its parameters is known (`sized`) there is
        no potential.
    """

    def __init__(
        self,
        potential: Potential | UserModel | Callable,
        *,
        name: str,
        coordinates: Sequence[int] | None = None,
        data: Any = None,
        latent: Any = None,
        seed: int | None = None,
        budget: Budget | None = None,
        log: Callable[[Plan, Arrival], None] | None = None,
    ):
        if not isinstance(name, str) or not name:
            raise InputError("Site(name)", repr(name), "Give a non-empty string.")
        given = isinstance(potential, (Potential, UserModel))
        if not given and not callable(potential):
            raise InputError(
                "Site(potential)",
                type(potential).__name__,
                "Give a potential made by fedpdmc.models, such as logistic(X, y), or a JAX function f(x, data) that returns "
                "the minus log likelihood.",
            )
        if given and data is not None:
            remedy = "The models of fedpdmc.models hold their data: leave data out."
            raise InputError("Site(data)", type(data).__name__, remedy)
        if given and latent is not None:
            raise InputError("Site(latent)", repr(latent), "It is for a potential given as a function f(x, z, data).")
        if budget is not None and not isinstance(budget, Budget):
            raise InputError("Site(budget)", repr(budget), "Give a fedpdmc.Budget, or None.")
        if log is not None and not callable(log):
            raise InputError("Site(log)", repr(log), "Give a function of a plan and an arrival, or None.")
        if budget is not None and (latent is not None or isinstance(potential, LatentPotential)):
            raise InputError("Site(budget)", "a model with private latents", NO_LATENT_BUDGET)
        seed = optional_seed("Site(seed)", seed, SEED_BITS)
        if budget is not None and seed is not None and not budget.seeded_for_tests:
            warnings.warn(
                f"site {name!r} has a seed and a privacy budget: anyone who guesses the seed knows its draws, and nothing "
                "is private. Omit the seed; for tests, use Budget(seeded_for_tests=True).",
                stacklevel=2,
            )
        self.name = name
        self.seed = seed
        self.budget: Budget | None = budget
        self.log = log
        self.model = None if isinstance(potential, Potential) else _model(potential, data, latent, budget)
        self._potential: Potential | None = None
        self._bare: tuple[Potential, Potential] | None = None
        # At most one; copies of the site share it.
        self.drawn: list[LatentPosterior] = []
        if isinstance(potential, Potential):
            self.raw = potential
            self._potential = potential if budget is None else hold_to_bounds(potential, budget)
        self.coordinates = _check_coordinates(coordinates, self.known_dim)
        dim = self.known_dim if self.coordinates is None else len(self.coordinates)
        if dim is not None:
            self._take_size(dim)

    def __repr__(self) -> str:
        model = "a function" if self._potential is None else type(self._potential).__name__
        return f"Site({self.name!r}, {model}, dim={self.known_dim}, records={self.records})"

    @property
    def known_dim(self) -> int | None:
        """Number of parameters that the site depends on, None if it is not known yet."""
        if self._potential is not None:
            return self._potential.dim
        return None if self.model is None else self.model.dim

    @property
    def potential(self) -> Potential:
        """The minus log likelihood of the site's records."""
        if self._potential is None:
            raise no_size(self.name)
        return self._potential

    @property
    def dim(self) -> int:
        """Number of parameters that the site depends on."""
        return self.potential.dim

    def _take_size(self, dim: int) -> None:
        if self._potential is None and self.model is not None:
            self._potential = self.raw = self.model.sized(dim, self.name)

    def sized(self, dim: int) -> Site:
        """The same site with a potential of ``dim`` parameters, if its model is a function of unknown dimension."""
        if self._potential is not None:
            return self
        site = copy.copy(self)
        site._take_size(dim)
        return site

    def padded(self, size: int) -> Site:
        """The same site with records padded to ``size``, if its model is a function; itself if that is not possible."""
        if self.model is None or isinstance(getattr(self._potential, "function", None), Padded):
            return self
        potential = self.model.padded(self.dim, self.name, size)
        return self if potential is None else self.holding(potential)

    def holding(self, potential: Potential) -> Site:
        """The same site with another form of its potential."""
        site = copy.copy(self)
        site._potential = site.raw = potential
        return site

    @property
    def bare_potential(self) -> Potential:
        """The potential as its derivatives are computed: reduced to its numbers, those of a bend included; made once."""
        if self._bare is None or self._bare[0] is not self.potential:
            own = bare(self.potential)
            self._bare = self.potential, own.bendable() if isinstance(own, RandomEffects) else own
        return self._bare[1]

    def bent(self, bend: Bend | None) -> Site:
        """The same site as a function of coordinates in which its log spreads are bent."""
        if bend is None:
            return self
        own = self._potential
        if not isinstance(own, RandomEffects) or own.spreads != bend.index or self.coordinates is not None:
            raise NotBent
        return self.holding(dataclasses.replace(own, bend=bend.numbers))

    @property
    def shares_noise(self) -> bool:
        """Whether its noise is shared with other sites, and only their sum is revealed."""
        return self.budget is not None and self.budget.colluding is not None

    @property
    def latents(self) -> int:  # type: ignore[override]
        """Private latents."""
        if self.model is not None:
            return len(self.model.latent_names)
        return self._potential.latents if isinstance(self._potential, LatentPotential) else 0

    @property
    def spreads(self) -> tuple[int, ...]:  # type: ignore[override]
        """Which parameters are log spreads of grouped effects."""
        return self._potential.spreads if isinstance(self._potential, RandomEffects) else ()

    def _check_latents(self) -> None:
        if not self.latents:
            raise InputError(f"site {self.name!r}", "a model without private latents", "Give one with latents.")

    def latent_posterior(self) -> LatentPosterior:
        """Draws of the site's own latents together with the shared parameters. They exist at the site alone.

        Raises
        ------
        InputError
            If the model has no private latents, or nothing has been sampled.
        """
        self._check_latents()
        if not self.drawn:
            raise InputError(f"site {self.name!r}", "no draws of its latents", "Call fedpdmc.sample first.")
        return self.drawn[0]

    def restore_latents(self, kept: LatentPosterior | str | Path) -> None:
        """Restore the latents of an earlier run, from the object or its file, so that a saved posterior can be extended."""
        self._check_latents()
        self.drawn[:] = [kept if isinstance(kept, LatentPosterior) else LatentPosterior.load(kept)]

    @property
    def noisy(self) -> bool:
        """Whether its derivatives are released with noise only, and charged."""
        return self.budget is not None

    @property
    def records(self) -> int:
        """Number of records."""
        return self.model.records if self.model is not None else int(getattr(self.potential, "records", 0))

    def derivatives(self, x: np.ndarray, spread: np.ndarray | None = None) -> tuple[float, np.ndarray, np.ndarray]:
        """``U_m``, ``∇U_m`` and ``∇²U_m`` at ``x[coordinates]``, or their averages: a release, used only for a reference."""
        if self.budget is not None:
            raise PrivacyError(
                f"site {self.name!r}: derivatives without noise are not released under a privacy budget (code NO_RELEASE)."
            )
        return derivatives(self, *own_part(x, spread, self.coordinates))

    def keys(self, run_seed: int, chains: int, draws: bool) -> ChainKeys:
        """The site's secret keys by chain: of its own seed, or of one derived from the run's seed and its name.

        Where bounces are draws, which are revealed, each has the 256 bits of a secret stream too.
        """
        seed = run_seed if self.seed is None else self.seed
        kind = "run" if self.seed is None else "own"
        digest = hashlib.sha256(f"{kind}/{seed}/{self.name}".encode()).digest()
        short = seed if seed < 2**63 else int.from_bytes(digest[8:16], "little") >> 1
        keys = chain_keys(jax.random.fold_in(jax.random.key(short), int.from_bytes(digest[:4], "little")), chains)
        if not draws:
            return keys
        secret = [hashlib.sha256(f"bounces/{kind}/{seed}/{self.name}/{c}".encode()).digest() for c in range(chains)]
        return jnp.concatenate([keys, jnp.asarray(np.frombuffer(b"".join(secret), "<u4").reshape(chains, -1))], 1)


def no_size(name: str) -> InputError:
    """The error for a function whose number of parameters is not known."""
    return InputError(
        f"sites ({name!r})",
        "a function whose number of parameters is not known",
        "Give a prior, init=, names=, or coordinates= of the site: they determine the number of parameters.",
    )


def _model(potential: Any, data: Any, latent: Any, budget: Budget | None) -> UserModel:
    if budget is not None:
        if isinstance(potential, RecordModel):
            return hold_file_to_bounds(potential, budget)
        raise InputError(
            "Site(budget)",
            "a model given as a function, whose records have no known sensitivity",
            "Privacy budgets need a model of records from fedpdmc.models, or a model file: fedpdmc.Model(...).of(...).",
        )
    return potential if isinstance(potential, UserModel) else user_model(potential, data, latent)


def own_part(
    x: np.ndarray, spread: np.ndarray | None, coordinates: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """A point, and a root of the covariance about it, in some of the coordinates."""
    if coordinates is None:
        return x, spread
    if spread is None:
        return x[coordinates], None
    rows = spread[coordinates]
    # The triangular factor of the transposed rows: RᵀR is their covariance, for any number of rows and columns.
    return x[coordinates], np.asarray(np.linalg.qr(rows.T, mode="r")).T


def derivatives(site: Site, own: np.ndarray, spread: np.ndarray | None = None) -> tuple[float, np.ndarray, np.ndarray]:
    """``U_m``, ``∇U_m`` and ``∇²U_m`` in the site's own parameters, or their averages, for its own use."""
    about = None if spread is None else on_device(spread)
    value, gradient, hessian = derivatives_of(site.bare_potential, on_device(own), about)
    return float(value), np.asarray(gradient), np.asarray(hessian)


def _check_coordinates(coordinates: Sequence[int] | None, dim: int | None) -> np.ndarray | None:
    if coordinates is None:
        return None
    index = np.asarray(coordinates)
    dim = index.size if dim is None else dim
    if index.ndim != 1 or index.dtype.kind not in "iu" or index.shape[0] != dim:
        remedy = f"Give {dim} integers, one for each parameter of the site's model."
        raise InputError("Site(coordinates)", repr(coordinates), remedy)
    if len(set(index.tolist())) != dim or index.min(initial=0) < 0:
        raise InputError("Site(coordinates)", repr(coordinates), "Give distinct indices that are zero or positive.")
    return index


@double_precision
def hand_over(sites: Sequence[Site], reference: Reference, run: Any) -> None:
    """Give each site its own latents at the ends of blocks, and their last state, from an engine of `fedpdmc.sampling`.

    If the run was ``continued``, they are appended to the site's earlier draws.
    """
    drawn = run.latents
    if not drawn:
        return
    last = run.settled
    times = np.array([time for time, _, _ in drawn])
    theta = np.stack([reference.to_x(np.asarray(a)) for _, a, _ in drawn], 1)
    for site in sites:
        if site.latents:
            names = latent_names(site)
            z = np.stack([found[site.name][:, : len(names)] for _, _, found in drawn], 1)
            found = LatentPosterior(times, theta, z, names, last[site.name])
            # A run that continues in memory includes its earlier draws.
            earlier = [own for own in site.drawn if run.continued and own.times[-1] < times[0]]
            site.drawn[:] = [earlier[0].followed_by(found) if earlier else found]


def latents_at(sites: Sequence[Site], time: float, chains: int) -> dict[str, np.ndarray]:
    """The sites' latents at this time of a run.

    Raises
    ------
    InputError
        A site has no latents of that run: `Site.restore_latents` was not called.
    """
    found = {}
    for site in sites:
        if not site.latents:
            continue
        own = site.drawn[0] if site.drawn else None
        if own is None or own.last is None or own.times[-1] != time or len(own.last) != chains:
            raise InputError(
                f"sites ({site.name!r})",
                "no latents at the end of the saved run",
                "Latents stay with their site: save them there with site.latent_posterior().save(path), and give them back "
                "with site.restore_latents(path).",
            )
        found[site.name] = own.last
    return found


def latent_names(site: Site) -> tuple[str, ...]:
    """Names of the latents: the group's name, with the number of the effect if there are several."""
    model = site.potential
    if not isinstance(model, RandomEffects):
        return () if site.model is None else site.model.latent_names
    labels, effects = (label or site.name for label in model.labels), model.effects.shape[1]
    return tuple(label if effects == 1 else f"{label}[{k}]" for label in labels for k in range(effects))
