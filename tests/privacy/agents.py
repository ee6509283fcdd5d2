"""Two real agents whose records are neighbours, and a hostile coordinator that has their bytes and knows both data sets."""

import numpy as np

import fedpdmc as fp
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.study import parse_study

RUN = bytes(16)
LEVEL, NUMBER, COUNT = (
    'y = { type = "level", levels = ["no", "yes"] }',
    'y = { type = "number", bounds = [-2, 2] }',
    'y = { type = "count", bounds = [0, 3] }',
)
OUTCOMES = {"logistic": LEVEL, "poisson": COUNT, "linear": NUMBER, "student_t": NUMBER}
OPTIONS = {"linear": "scale = 1.0", "student_t": "df = 3.0\nscale = 1.0"}
CONTRACT = """
format = 1
name = "attacked"
sites = ["north"]

[model]
family = "{family}"
formula = "y ~ x"
{options}

[columns]
{outcome}
x = {{ type = "number", bounds = [-1, 1] }}

[prior]
scale = 2.0

[dynamics]
kind = "{kind}"
reference = "{reference}"
control = "{control}"
chains = {chains}

[run]
duration = 1.0

[releases]
derivatives = "noisy"

[limits]
rounds = 100000
records = 10000
observed_time = 1e9

[privacy]
epsilon = {epsilon}
delta = 1e-5
neighbours = "{neighbours}"
excess = {excess}
release = 0.1
{region}
"""


def contract(
    family="logistic",
    kind="ZigZag",
    neighbours="replace",
    control="quadratic",
    chains=64,
    excess=2.0,
    epsilon=1e4,
    reference="laplace",
):
    """A contract under which a coordinator may choose reference and control variate."""
    region = "region = 1.0" if family in ("poisson", "linear") else ""
    excess = 20.0 if family == "poisson" else excess
    return parse_study(
        CONTRACT.format(
            family=family, kind=kind, neighbours=neighbours, control=control, chains=chains, excess=excess, region=region,
            epsilon=epsilon, reference=reference, outcome=OUTCOMES[family], options=OPTIONS.get(family, ""),
        ).encode()
    )  # fmt: skip


def neighbours(family, relation, n=40):
    """Two data sets, rows ``(y, x)``, that are neighbours and far apart as such."""
    rng = np.random.default_rng(n)
    x = rng.uniform(-1, 1, n).round(3)
    high, low = {"logistic": ("yes", "no"), "poisson": (3, 0)}.get(family, (2.0, -2.0))
    middle = {"logistic": ["no", "yes"], "poisson": [0, 1, 2]}.get(family, [-0.5, 0.25, 1.0])
    rows = [(middle[k % len(middle)], float(x[k])) for k in range(n)]
    one, other = [(high, 1.0), *rows], [(low, 1.0), *rows]
    if relation == "replace":
        other[0] = (low, -1.0)
    if relation == "add-remove":
        other = rows
    return one, other


class Attacked:
    """An agent with these records, and what passes between it and the coordinator."""

    def __init__(self, study, rows, folder, name):
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / f"{name}.csv"
        data.write_text("\n".join(["y,x", *(f"{y},{x}" for y, x in rows)]) + "\n")
        self.ledger = folder / f"{name}.db"
        if not self.ledger.exists():
            fp.create_ledger(self.ledger)
        self.study, self.options = study, {"store": folder / name, "ledger": self.ledger}
        self.agent = open_agent(study, "north", data, **self.options)
        self.agent.join(messages.encode(messages.Welcome(RUN, study.digest)))
        self.sequence = 1

    def ask(self, message):
        """The answer's bytes, and the answer."""
        data = self.agent.answer(messages.encode(message))
        answer = messages.decode(data)
        self.sequence += not isinstance(answer, messages.Refusal)
        return data, answer

    def derive(self, x, spread=None):
        """Derivatives at a point, or their means about it. Neither their number nor that of refusals is limited."""
        told = self.ask(messages.Derive(RUN, self.sequence, np.asarray(x), *(() if spread is None else (spread,))))[1]
        self.agent.refusals, self.agent.computation.progress.points = 0, 0
        self.agent.computation._points.clear()
        return told

    def open(
        self, center=(0.0, 0.0), scale=(1.0, 1.0), precision=None, linear=(0.0, 0.0), point=(0.0, 0.0), segments=1
    ):
        """Open a run with a reference and a control variate."""
        center, scale, linear, point = (np.asarray(x, float) for x in (center, scale, linear, point))
        precision = np.zeros((2, 2)) if precision is None else np.asarray(precision, float)
        order = {"none": 0, "linear": 1, "quadratic": 2}[self.study.control]
        if not order:
            precision, linear, point = np.zeros((0, 0)), np.zeros(0), np.zeros(0)
        return self.ask(
            messages.Open(
                RUN, self.sequence, self.study.chains, segments, center, scale, order, precision, linear, point
            )
        )

    def plans(self, start, velocity, horizon, number=0):
        """The same plan on every chain."""
        chains = self.study.chains
        rows = [np.broadcast_to(np.asarray(x, float), (chains, 2)) for x in (start, velocity)]
        return self.ask(
            messages.Plans(
                RUN, self.sequence, np.full(chains, number), rows[0], np.full((chains, 1), float(horizon)),
                rows[1][:, None], np.arange(chains),
            )
        )  # fmt: skip

    @property
    def spent(self):
        """Rényi divergence charged so far."""
        ledger, account = self.agent.site.budget.open()
        return ledger.spent(account.dataset)

    def close(self):
        self.agent.log.close()
        self.agent.site.budget.open()[0].close()


def attacked(folder, family="logistic", relation="replace", **terms):
    """Two agents with neighbouring records."""
    study = contract(family, neighbours=relation, **terms)
    return [Attacked(study, rows, folder, f"{k}") for k, rows in enumerate(neighbours(family, relation))]
