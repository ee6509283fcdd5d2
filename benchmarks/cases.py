"""What is run against what, and how long: the one place to change a size."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Of a quick run, which shows that everything works and whose figures mean nothing.
QUICK_SHARE, QUICK_REPEATS, QUICK_EVENTS = 0.05, 2, 500


@dataclass(frozen=True)
class Case:
    """One setting of the package.

    Attributes
    ----------
    problem : str
        A key of `problems.PROBLEMS`.
    chains, sites : int
        Chains side by side; sites over which the records are spread evenly.
    steps : int
        Length of a timed run: draws of each chain, `Problem.spacing` apart.
    method : str
        "plain": Zig-Zag. "whitened": Zig-Zag on Laplace coordinates with quadratic control variates, which is
        another process than the rival's.
    repeats : int
        Timed runs, each with a seed of its own.
    goal : tuple of (str, float), optional
        The rate and the ratio to the rival that the project asks for.
    """

    problem: str
    chains: int
    sites: int
    steps: int
    method: str = "plain"
    repeats: int = 7
    goal: tuple[str, float] | None = None

    @property
    def against_rival(self) -> bool:
        """Whether the rival can run it: it samples pooled data, by the plain process."""
        return self.sites == 1 and self.method == "plain"

    def quick(self) -> Case:
        """The same, much shorter."""
        return replace(self, steps=max(int(QUICK_SHARE * self.steps), 30), repeats=QUICK_REPEATS)


CASES = (
    Case("paper_gaussian", 64, 1, 15_000, goal=("events", 5.0)),
    Case("paper_gaussian", 1, 1, 300_000, goal=("events", 1.0)),
    Case("paper_logistic", 64, 1, 2_400, goal=("ess", 5.0)),
    Case("paper_logistic", 1, 1, 40_000, goal=("ess", 1.0)),
    Case("paper_logistic", 64, 1, 1_000, method="whitened"),
    # Many sites mix slowly: longer runs, for each chain must see several effective samples.
    Case("paper_gaussian", 64, 10, 1_200, repeats=5),
    Case("paper_gaussian", 64, 50, 500, repeats=3),
    Case("paper_logistic", 64, 10, 600, repeats=3),
    Case("paper_logistic", 64, 50, 200, repeats=3),
)
EXECUTIONS = ("sequential", "vmap")
