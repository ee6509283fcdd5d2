"""``fedpdmc demo``: the indomethacin trial in its four hospitals, none of which shows its records."""

# BlackJAX declares its states and its adaptation as bare protocols, without the fields they have.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray
from rich.console import Console
from rich.table import Table

import fedpdmc as fp
from fedpdmc.datasets import Trial, indomethacin
from fedpdmc.results.forest_plot import EffectScale, Row, forest

PRIOR_SCALE = 2.5
LABELS = {
    "intercept": "baseline odds",
    "indomethacin": "indomethacin v. placebo",
    "risk": "risk score, per point",
    "age": "age, per 10 years",
    "male": "men v. women",
}
# A normal deviate this large has probability 6e-5: the check compares ten of them.
Z_LIMIT = 4.0


class CoefficientSummary(NamedTuple):
    """Mean, standard deviation, effective sample size and quantiles (2.5, 25, 50, 75, 97.5 %) of each coefficient."""

    mean: Float[ndarray, " d"]
    sd: Float[ndarray, " d"]
    ess: Float[ndarray, " d"]
    quantiles: Float[ndarray, "5 d"]


def run(out: Path, *, seed: int, check: bool) -> bool:
    """Fit, print, compare and save; false only if the comparison with pooled NUTS fails."""
    console = Console()
    trial = indomethacin()
    sizes = ", ".join(f"{h.name} ({len(h.y)})" for h in trial.hospitals)
    console.print(
        "[bold]Does indomethacin prevent pancreatitis after ERCP?[/bold]\n"
        f"Elmunzer et al. 2012, four hospitals, one site each: {sizes}.\n"
        f"Logistic regression; weakly informative prior: independent N(0, {PRIOR_SCALE}²) on the log odds scale."
    )

    started = time.perf_counter()
    sites = [fp.Site(fp.models.logistic(h.X, h.y), name=h.name) for h in trial.hospitals]
    prior = fp.models.normal_prior(len(trial.names), scale=PRIOR_SCALE)
    post = fp.sample(sites, prior=prior, names=trial.names, seed=seed)
    seconds = time.perf_counter() - started

    federated = _summarise_federated(post, trial.names)
    console.print(str(post.verdict), style="" if post.verdict else "red", highlight=False)
    console.print(_odds_table(federated, post.ess(), post.rhat(), trial.names))
    console.print(_traffic_table(post, trial))
    bounds = "event bounds certified (this says nothing about convergence)."
    bounds = bounds if post.certified else "[red]event bounds NOT certified: not exact.[/red]"
    console.print(f"{post.rounds} rounds of messages, {seconds:.1f} s with compilation; {bounds}")

    pooled, agrees = None, True
    if check and find_spec("blackjax") is None:
        console.print("No check against pooled NUTS: install it with the extra 'reference' (fedpdmc\\[reference]).")
    elif check:
        pooled = _summarise_pooled(trial, seed)
        agrees = _print_comparison(console, federated, pooled, trial.names)

    out.mkdir(parents=True, exist_ok=True)
    _forest_plot(federated, pooled, trial.names).savefig(out / "forest.png", dpi=200)
    post.save(str(out / "posterior.zarr"))
    console.print(f"Saved: {out / 'forest.png'} (the plot) and {out / 'posterior.zarr'} (read it with fedpdmc.load).")
    console.print("Next: your own records, as in the example of README.md.")
    return agrees


def _summarise_federated(post, names: tuple[str, ...]) -> CoefficientSummary:
    """Moments are averages of the posterior itself; quantiles come from draws."""
    ess = post.ess()
    # Second moments mix no faster than the energy.
    worst = np.array([min(ess[name], ess["energy"]) for name in names])
    draws = post.draws(1000).reshape(-1, len(names))
    return CoefficientSummary(post.mean(), np.sqrt(np.diag(post.cov())), worst, _quantiles(draws))


def _summarise_pooled(trial: Trial, seed: int) -> CoefficientSummary:
    from fedpdmc.results.diagnostics import bulk_ess

    X, y = (np.concatenate(parts) for parts in zip(*((h.X, h.y) for h in trial.hospitals), strict=True))
    draws = _pooled_nuts(X, y, PRIOR_SCALE, seed=seed)
    flat = draws.reshape(-1, draws.shape[-1])
    ess = np.array([bulk_ess(draws[:, :, i]) for i in range(draws.shape[-1])])
    return CoefficientSummary(flat.mean(0), flat.std(0, ddof=1), np.minimum(ess, len(flat)), _quantiles(flat))


def _pooled_nuts(
    X: Float[ndarray, "n d"],
    y: Float[ndarray, " n"],
    prior_scale: float,
    *,
    seed: int,
    chains: int = 8,
    warm_up: int = 400,
    draws: int = 1000,
) -> Float[ndarray, "chains draws d"]:
    """Draws of a logistic regression with independent ``N(0, prior_scale²)`` priors, in 64 bits, by NUTS (BlackJAX).

    A real federation could not run it: the records are pooled. Every chain starts at its own point, adapts its own step
    size and metric, and is then run with both frozen.
    """
    import blackjax
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True):
        design, outcome = jnp.asarray(X), jnp.asarray(y)

        def log_density(x):
            z = design @ x
            return jnp.sum(outcome * z - jax.nn.softplus(z)) - 0.5 * jnp.sum((x / prior_scale) ** 2)

        def run_chain(key):
            start_key, adapt_key, draw_key = jax.random.split(key, 3)
            start = 0.5 * jax.random.normal(start_key, (design.shape[1],))
            adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
            (state, parameters), _ = adaptation.run(adapt_key, start, num_steps=warm_up)
            step = blackjax.nuts(log_density, **parameters).step

            def body(state, key):
                after, _ = step(key, state)
                return after, after

            _, states = jax.lax.scan(body, state, jax.random.split(draw_key, draws))
            return states.position

        return np.asarray(jax.jit(jax.vmap(run_chain))(jax.random.split(jax.random.key(seed), chains)))


def _quantiles(draws: Float[ndarray, "n d"]) -> Float[ndarray, "5 d"]:
    return np.quantile(draws, [0.025, 0.25, 0.5, 0.75, 0.975], axis=0)


def _table(title: str, *headings: str) -> Table:
    table = Table("", title=title, title_justify="left", caption_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _odds_table(
    summary: CoefficientSummary, ess: dict[str, float], rhat: dict[str, float], names: tuple[str, ...]
) -> Table:
    table = _table("Odds ratios of pancreatitis", "odds ratio", "95 % interval", "ESS", "R-hat")
    table.caption = "Baseline: a woman of 45 on placebo with risk score 2.5."
    for name in [*names[1:], names[0]]:
        low, _, middle, _, high = np.exp(summary.quantiles[:, names.index(name)])
        words = f"{middle:.2f}", f"{low:.2f} to {high:.2f}", f"{ess[name]:,.0f}", f"{rhat[name]:.3f}"
        table.add_row(LABELS[name], *words)
    return table


def _traffic_table(post, trial: Trial) -> Table:
    table = _table("What each hospital did", "patients", "messages", "kB exchanged", "passes over its records")
    columns = zip(trial.hospitals, post.messages, post.bytes, post.gradient_evaluations, strict=True)
    for hospital, messages, size, passes in columns:
        table.add_row(hospital.name, f"{len(hospital.y)}", f"{messages:,}", f"{size / 1e3:,.0f}", f"{passes:,}")
    return table


def _print_comparison(
    console: Console, federated: CoefficientSummary, pooled: CoefficientSummary, names: tuple[str, ...]
) -> bool:
    """Print both runs side by side; true if means and standard deviations agree up to Monte Carlo error."""
    errors = (one.sd / np.sqrt(one.ess) for one in (federated, pooled))
    shift = (federated.mean - pooled.mean) / np.hypot(*errors)
    ratio = federated.sd / pooled.sd
    # The standard error of log(sd) is 1/√(2 ESS) for a normal variable.
    spread = np.log(ratio) / np.sqrt(0.5 / federated.ess + 0.5 / pooled.ess)

    title = "Check against NUTS (BlackJAX) on the pooled records, log odds"
    table = _table(title, "federated mean", "pooled mean", "shift / MC error", "sd ratio")
    for name, one, other, moved, by in zip(names, federated.mean, pooled.mean, shift, ratio, strict=True):
        table.add_row(name, f"{one:+.3f}", f"{other:+.3f}", f"{moved:+.1f}", f"{by:.3f}")
    console.print(table)

    largest = max(np.abs(shift).max(), np.abs(spread).max())
    agrees = bool(largest <= Z_LIMIT)
    verdict = "[green]agree[/green]" if agrees else "[red]DISAGREE[/red]"
    console.print(f"The two {verdict}: means and sds differ by at most {largest:.1f} Monte Carlo standard errors.")
    return agrees


def _forest_plot(federated: CoefficientSummary, pooled: CoefficientSummary | None, names: tuple[str, ...]) -> Figure:
    """Odds ratios on a log axis, and below each that of pooled NUTS if available."""
    rows = []
    for i, name in enumerate(names[1:], 1):
        for summary, label in ((federated, LABELS[name]), (pooled, "NUTS on pooled records")):
            if summary is not None:
                rows.append(Row(label, *np.exp(summary.quantiles[[0, 2, 4], i])))
    scale = EffectScale({"odds ratio of pancreatitis after ERCP (log scale)": None})
    panels = [("Four hospitals, one exact posterior, no pooled records", rows)]
    return forest(Figure(layout="constrained"), panels, scale, None, 0.95, width=8.0)[0].figure
