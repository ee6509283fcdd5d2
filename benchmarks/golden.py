"""Hashes of short seeded runs of every kind: whether a change of the code has changed any bit of what is drawn.

``python -m benchmarks.golden --write before.json`` before a change and ``--against before.json`` after it, on the same
machine with as many cores; ``--only WORD`` runs those whose names contain the word. A hash is that of all draws and of
the counts of events and rounds. A run that may differ (another clock, another reference) is judged by
`benchmarks.calibration` instead.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import fedpdmc as fp

SHORT = {"chains": 16, "seed": 7, "progress": False}
EXPLICIT = {"reference": "identity", "duration": 4.0, "burn_in": 1.0}


def _table(seed: int, n: int, d: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([20, seed])
    X = np.concatenate([np.ones((n, 1)), rng.normal(0.2, 0.8, (n, d - 1))], 1)
    return X, X @ np.linspace(-0.5, 0.8, d)


def _responses(eta: np.ndarray, family: str) -> np.ndarray:
    rng = np.random.default_rng(31)
    if family == "logistic":
        return (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float)
    if family == "poisson":
        return rng.poisson(np.exp(eta)).astype(float)
    if family == "gamma":
        return rng.gamma(2.0, np.exp(eta) / 2)
    return eta + 0.7 * rng.standard_t(5, len(eta))


def _sites(family: str, sizes: tuple[int, ...] = (40, 23), d: int = 3) -> list[fp.Site]:
    extra = {"student_t": (4.0,), "linear": (0.7,)}.get(family, ())
    made = []
    for i, n in enumerate(sizes):
        X, eta = _table(i, n, d)
        made.append(fp.Site(getattr(fp.models, family)(X, _responses(eta, family), *extra), name=f"site {i}"))
    return made


def _prior(d: int = 3) -> object:
    return fp.models.normal_prior(d, mean=0.3, scale=2.0)


def _own(x: jnp.ndarray, data: dict) -> jnp.ndarray:
    eta = data["X"] @ x
    return jnp.sum(jnp.logaddexp(0.0, eta) - data["y"] * eta + 0.05 * jnp.sqrt(1 + eta**2))


def _own_sites() -> list[fp.Site]:
    tables = [_table(i, n) for i, n in enumerate((30, 19))]
    return [
        fp.Site(_own, name=f"site {i}", data={"X": X, "y": _responses(eta, "logistic")})
        for i, (X, eta) in enumerate(tables)
    ]


def _effects(family: str) -> list[fp.Site]:
    made = []
    for i in range(2):
        X, eta = _table(i, 48)
        wards = np.repeat(np.arange(6), 8)
        y = _responses(eta + 0.3 * (wards - 2.5), family)
        model = fp.models.random_effects(X, y, 10 * i + wards, family=family)
        made.append(fp.Site(model, name=f"site {i}"))
    return made


def _run(sites: object, prior: object = None, **options: object) -> fp.Posterior:
    return fp.sample(sites, prior, **{**SHORT, **options})  # type: ignore[arg-type]


def _from_table(formula: str, family: str) -> fp.Posterior:
    import pandas as pd

    X, eta = _table(5, 90)
    columns = {"y": _responses(eta, family), "dose": X[:, 1], "age": 50 + 10 * X[:, 2]}
    frame = pd.DataFrame(columns).assign(clinic=np.repeat(["a", "b", "c"], 30))
    return _run(fp.sites(frame, by="clinic", formula=formula, family=family), duration=3.0)


def _private() -> fp.Posterior:
    X, eta = _table(1, 400)
    X /= np.maximum(1, np.linalg.norm(X, axis=1))[:, None] / 2
    with tempfile.TemporaryDirectory() as folder:
        fp.create_ledger(Path(folder) / "ledger.db")
        budget = fp.Budget(4.0, 1e-5, ledger=Path(folder) / "ledger.db", bounds=fp.Bounds(norm=2.0))
        site = fp.Site(fp.models.logistic(X, _responses(eta, "logistic")), name="north", seed=3, budget=budget)
        return _run([site], _prior(), dynamics=fp.ZigZag(), chains=2, duration=0.5, burn_in=0.0)


def _study(kind: str, **options: object) -> fp.Posterior:
    from tests.federation import studies

    with tempfile.TemporaryDirectory() as folder:
        return studies.Folder(Path(folder), getattr(studies, kind)).in_process(**options)


def _zoo(name: str) -> fp.Posterior:
    from tests.zoo import CASES

    case = CASES[name]
    sites = [fp.Site(case.likelihood, name=f"site {i}", data=data) for i, data in enumerate(case.sites())]
    return _run(sites, case.prior, names=case.names, duration=2.0)


def _family(name: str) -> fp.Posterior:
    from tests import family_cases

    sites, _ = getattr(family_cases, name)()
    return _run(sites, fp.models.normal_prior(sites[0].potential.dim, scale=1.5), duration=2.0)


def _wards() -> list[fp.Site]:
    rng = np.random.default_rng(4)
    made = []
    for i in range(3):
        X = rng.normal(0.2, 1.0, (20, 2))
        y = (rng.random(20) < 1 / (1 + np.exp(-X @ [0.5, -0.5]))).astype(float)
        made.append(fp.Site(fp.models.logistic(X, y), name=f"ward {i}", coordinates=[0, i + 1]))
    return made


DYNAMICS = {
    "ZigZag": functools.partial(fp.ZigZag, excess=0.1),
    "BouncyParticle": fp.BouncyParticle,
    "Boomerang": fp.Boomerang,
    "FactorisedBoomerang": fp.FactorisedBoomerang,
}


def _runs() -> dict[str, Callable[[], fp.Posterior]]:
    runs: dict[str, Callable[[], fp.Posterior]] = {}
    for family in ("logistic", "poisson", "student_t", "linear"):
        runs[f"default {family}"] = lambda f=family: _run(_sites(f), _prior(), duration=8.0)
        for name in ("ZigZag", "Boomerang"):
            runs[f"{name} {family}"] = lambda f=family, n=name: _run(
                _sites(f), _prior(), dynamics=DYNAMICS[n](), **EXPLICIT
            )
    for name in ("BouncyParticle", "FactorisedBoomerang"):
        runs[f"{name} logistic"] = lambda n=name: _run(_sites("logistic"), _prior(), dynamics=DYNAMICS[n](), **EXPLICIT)
    controlled = {"reference": "laplace", "control": "quadratic", "duration": 6.0}
    for name, make in DYNAMICS.items():
        runs[f"controlled {name} logistic"] = lambda m=make: _run(
            _sites("logistic"), _prior(), dynamics=m(), **controlled
        )
    runs |= {
        "default logistic draw": lambda: _run(_sites("logistic"), _prior(), duration=8.0, bounce="draw"),
        "default logistic many sites": lambda: _run(_sites("logistic", (9, 14, 30, 5, 8, 21)), _prior(), duration=8.0),
        "default logistic large": lambda: _run(_sites("logistic", (4000, 900), 6), _prior(6), duration=8.0),
        "default logistic dense": lambda: _run(_sites("logistic", (300,), 20), _prior(20), duration=6.0, chains=64),
        "ess logistic": lambda: fp.sample(_sites("logistic"), _prior(), ess=600, seed=2, progress=False),
        "separated logistic": lambda: _run(_sites("logistic", (8, 5)), _prior(), ess=400),
        "linear control ZigZag": lambda: _run(
            _sites("logistic"), _prior(), dynamics=fp.ZigZag(), reference="laplace", control="linear", duration=4.0
        ),
        "prior at sites": lambda: _run(_sites("poisson"), _prior(), prior_at="sites", dynamics=fp.ZigZag(), **EXPLICIT),
        "prior at extra": lambda: _run(_sites("poisson"), _prior(), prior_at="extra", duration=5.0),
        "redistributed prior": lambda: _run(
            _sites("logistic"), fp.Redistributed(_prior(), 1.0), dynamics=fp.ZigZag(), **EXPLICIT
        ),
        "constraints": lambda: _run(
            _sites("logistic"), _prior(), constraints=(np.array([[0.0, 1.0, 0.0]]), np.array([0.2])), duration=5.0
        ),
        "coordinates ZigZag": lambda: _run(
            _wards(), fp.models.normal_prior(4, scale=1.5), dynamics=fp.ZigZag(), **EXPLICIT
        ),
        "own function": lambda: _run(_own_sites(), _prior(), duration=4.0),
        "own function ZigZag": lambda: _run(
            _own_sites(), _prior(), dynamics=fp.ZigZag(), **{**EXPLICIT, "duration": 2.0}
        ),
        "own function adaptive": lambda: _run(
            _own_sites(), _prior(), dynamics=fp.ZigZag(), bounds="adaptive", **EXPLICIT
        ),
        "own prior": lambda: _run(
            _sites("logistic"), lambda x: 0.5 * jnp.sum(x**2) + 0.1 * jnp.sum(jnp.logaddexp(x, -x)), duration=4.0
        ),
        "effects logistic": lambda: _run(
            sites := _effects("logistic"), fp.models.effects_prior(sites[0].potential, scale=1.5), duration=3.0
        ),
        "table logistic": lambda: _from_table("y ~ dose + age", "logistic"),
        "table grouped": lambda: _from_table("y ~ dose + (1 | clinic)", "poisson"),
        "network ZigZag": lambda: _study("ZIGZAG"),
        "network few rounds": lambda: _study("FEW_ROUNDS"),
        "network summed": lambda: _study("SUMMED"),
        "network model file": lambda: _study("MODEL_ZIGZAG"),
        "private ZigZag": _private,
    }
    for name in ("weibull", "negative_binomial", "gamma"):
        runs[f"family {name}"] = lambda n=name: _family(n)
    for name in ("zero_inflated_poisson", "michaelis_menten"):
        runs[f"zoo {name}"] = lambda n=name: _zoo(n)
    return runs


def fingerprint(post: fp.Posterior) -> str:
    """A hash of draws, events and rounds."""
    digest = hashlib.sha256()
    for part in (post.draws(16), post.mean(), post.cov(), np.asarray(post.events), np.asarray(post.rounds)):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:24]


def main() -> None:
    """Run, print, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="words that the name of a run contains")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    before = json.loads(options.against.read_text()) if options.against else {}
    found, changed = {}, 0
    for name, run in _runs().items():
        if options.only and not any(word in name for word in options.only):
            continue
        began = time.perf_counter()
        try:
            found[name] = fingerprint(run())
        except Exception as error:  # noqa: BLE001
            found[name] = f"{type(error).__name__}: {error}"[:200]
        verdict = "" if name not in before else "same" if before[name] == found[name] else "CHANGED"
        changed += verdict == "CHANGED"
        print(f"{name:32} {found[name]}  {time.perf_counter() - began:5.1f} s  {verdict}", flush=True)
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
