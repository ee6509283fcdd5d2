"""The tree of exceptions: every message names the argument, the value found and the remedy."""

from __future__ import annotations


class FedPDMCError(Exception):
    """Root of all errors that the package raises on purpose."""


class InputError(FedPDMCError, ValueError):
    """An argument cannot be used as given.

    Parameters
    ----------
    argument : str
        The argument's name, as the user wrote it.
    found : str
        What was found there.
    remedy : str
        What to do about it.
    """

    def __init__(self, argument: str, found: str, remedy: str):
        self.argument, self.found, self.remedy = argument, found, remedy
        super().__init__(f"{argument}: found {found}. {remedy}")


class BoundViolation(FedPDMCError):
    """A rate rose above a bound that was certified: a bug, never repaired silently.

    The coordinator learns the site's name and the chain; the figures stay at the site.
    """

    def __init__(self, site: str, chain: int):
        self.site, self.chain = site, chain
        super().__init__(
            f"site {site!r}, chain {chain}: a rate exceeded its certified bound (code BOUND_VIOLATED). The run was "
            "stopped because its draws would not be exact. Please report it with the model family and the dynamics."
        )


class NotFinite(FedPDMCError):
    """A site's rate was not a finite number at a point of the plan."""

    def __init__(self, site: str, chain: int, message: str | None = None):
        self.site, self.chain = site, chain
        super().__init__(
            message
            or f"site {site!r}, chain {chain}: the rate was not finite (code NOT_FINITE). Start nearer to the posterior "
            "(init=), rescale the covariates, or use reference='laplace'."
        )


class RunTooLong(FedPDMCError):
    """At the pace of its first events the run would never end in practice."""


class ImproperPosterior(FedPDMCError):
    """The mode could not be found because the posterior has none, or is flat in some direction."""
