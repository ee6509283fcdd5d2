"""The tree of exceptions: every message names the argument, the value found and the remedy."""

from __future__ import annotations

# What to do about an operation that is not finite, in a user's function.
GUARD = (
    "Give that operation an argument for which it is smooth, by a jnp.where inside of it and another around it (for a power "
    "of zero: jnp.where(d > 0, jnp.where(d > 0, d, 1.0) ** h, 0.0)); write sqrt(x * x) as abs(x); or keep the parameters "
    "away from there with constraints=(A, b) or a change of variables."
)


class FedPDMCError(Exception):
    """Base class of all errors that the package raises deliberately."""


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
    """A site's rate was not a finite number at a point of the plan.

    ``where`` names the operation of a user's function that is not finite there, and its line.
    """

    def __init__(self, site: str, chain: int, message: str | None = None, where: str | None = None):
        self.site, self.chain, self.where = site, chain, where
        cause, remedy = "", "Start nearer to the posterior (init=), rescale the covariates, or use reference='laplace'."
        if where is not None:
            cause = f". The function or its gradient is infinite or not a number here: {where}"
            remedy = GUARD
        found = f"site {site!r}, chain {chain}: the rate was not finite (code NOT_FINITE){cause}. {remedy}"
        super().__init__(message or found)


class RunTooLong(FedPDMCError):
    """At the rate of its first events the run would take too long to finish."""


class ImproperPosterior(FedPDMCError):
    """The posterior is flat in some direction, or levels off, so that it cannot be normalised."""


class NoMode(FedPDMCError):
    """The posterior density grows without bound, as that of a centred hierarchy does."""


class ModeNotFound(FedPDMCError):
    """The search for the mode ended before it was found."""


class WireError(FedPDMCError):
    """Bytes that are not a message, or a message whose fields do not fit together.

    Parameters
    ----------
    field : str
        Where in the message.
    """

    def __init__(self, field: str, found: str):
        self.field, self.found = field, found
        super().__init__(f"{field}: found {found}. The message was refused.")


class BadAnswer(FedPDMCError):
    """A site answered something that cannot be the answer to what it was asked."""

    def __init__(self, site: str, reason: str):
        self.site, self.reason = site, reason
        super().__init__(
            f"site {site!r}: {reason} (code BAD_ANSWER). The run was stopped at its last complete block; check the "
            "site's software and start the coordinator again to continue."
        )


class Refused(FedPDMCError):
    """A site or the coordinator refused a request.

    Attributes
    ----------
    code : str
        A code; the site's own log has the details.
    """

    def __init__(self, site: str, code: str, remedy: str = "The site's audit log says why."):
        self.site, self.code = site, code
        super().__init__(f"site {site!r} refused (code {code}). {remedy}")


class PointDeclined(FedPDMCError):
    """A site declines to release derivatives at a point of a search that can do without it."""


class RequestRefused(Exception):
    """A site does not answer a request.

    Parameters
    ----------
    code : str
        What the coordinator is sent.
    words : str
        For the site's own log.
    chain : int
        Counted from one, if the reason is in one chain.
    """

    def __init__(self, code: str, words: str = "", chain: int = 0):
        self.code, self.words, self.chain = code, words, chain
        super().__init__(words or code)


class LimitReached(Refused):
    """A site has answered all that the contract allows, in rounds or observed time, or its policy, in information."""

    def __init__(self, site: str, code: str, used: str = ""):
        remedy = f"The contract's limits are used up: going on takes a new contract.{used}"
        if code == "INFORMATION_SPENT":
            remedy = (
                "Its answers would carry more information than its policy allows (most_bits for each record). Ask for fewer "
                "effective samples, agree on a contract with [privacy], or have the site raise most_bits in its policy.toml."
            )
        super().__init__(site, code, remedy)


class PrivacyError(FedPDMCError):
    """A site refuses because answering would break, or could break, its privacy guarantee."""


class BudgetSpent(PrivacyError):
    """What is left of a site's privacy budget does not cover the plan."""


class PlanRefused(PrivacyError):
    """A site does not answer this plan: it is not what the site agreed to, or its round has another plan already."""


class LedgerError(PrivacyError):
    """The ledger cannot be written or trusted: nothing is answered until an operator has resolved this."""


class NoEnclosure(FedPDMCError, NotImplementedError):
    """A model uses an operation for which no certified bound is known.

    Attributes
    ----------
    primitive : str
        The JAX primitive.
    where : str
        The line of the model that it comes from.
    reason : str or None
        What about its use has no bound, if another use has one.
    """

    def __init__(self, primitive: str, where: str, reason: str | None = None):
        self.primitive, self.where, self.reason = primitive, where, reason
        super().__init__(
            f"no certified bound for the primitive {primitive!r} at {where}{f' ({reason})' if reason else ''}. Write that "
            f"line with other operations, teach a rule with fedpdmc.enclosures.register({primitive!r}), or give up "
            "certainty with bounds='adaptive'."
        )


class Discontinuous(NoEnclosure):
    """A model that is not shown to be continuous in its parameters: the process would walk through a jump.

    Attributes
    ----------
    primitive, where, reason
        As for `NoEnclosure`.
    """

    def __init__(self, primitive: str, where: str, reason: str):
        self.primitive, self.where, self.reason = primitive, where, reason
        FedPDMCError.__init__(
            self,
            f"the potential may jump at {where}: {primitive!r}, {reason}. A gradient does not show a jump, so that draws "
            "would be wrong. Let both branches have the same value where they meet, or write a smooth function; vouch for a "
            "function of your own that does not jump (fedpdmc.models.continuous: the run is then not certified); fix a "
            "change point, or sum over its places (logsumexp); for a limit use constraints=(A, b) of fedpdmc.sample, or a "
            "change of variables.",
        )
