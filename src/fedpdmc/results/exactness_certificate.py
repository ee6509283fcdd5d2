"""The basis of ``certified`` for each site: how event times were drawn, and what was proved about the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedpdmc._jax.precision import double_precision
from fedpdmc.clocks import AdaptiveClock, Clock
from fedpdmc.enclosures import inventory
from fedpdmc.potentials import program_of

TITLES = ("rules", "known as a whole", "TAUGHT BY THE USER")


@double_precision
def certificate(names: Sequence[str], clocks: dict[str, Clock]) -> list[dict[str, Any]]:
    """One entry for each site; for a remote site it says only that, because the site alone knows the rest.

    Parameters
    ----------
    names : sequence of str
        Of all sites.
    clocks : dict
        Of the sites in this process, by name.
    """
    return [_entry(name, clocks.get(name)) for name in names]


def _entry(name: str, clock: Clock | None) -> dict[str, Any]:
    if clock is None:
        return {"site": name, "clock": "at the site"}
    entry: dict[str, Any] = {"site": name, "clock": clock.name, "domain": clock.domain}
    entry["certified"] = not isinstance(clock, AdaptiveClock)
    program = program_of(getattr(clock, "potential", None))
    if program is None:
        return entry | {"model": "built in: its bounds are derived in the source"}
    used = inventory(program._gradient, program.dim)
    entry |= {"model": "a function", "primitives": used.primitives, "functions": used.functions, "taught": used.taught}
    if not entry["certified"]:
        return entry
    entry["continuity"] = "shown"
    if lines := program.assertions:
        entry |= {"certified": False, "continuity": f"ASSERTED BY THE USER and not shown, at {', '.join(lines)}"}
    entry["rounding"] = "a bound is carried with every value"
    return entry


ASSERTED = "they are exact if the continuity that the user asserts holds"


class Certificate(list[dict[str, Any]]):
    """The entries of all sites, with the number of evaluations of each site's exact rates; prints as a text.

    ``walls`` is the number of constraints of the run.
    """

    def __init__(
        self,
        entries: list[dict[str, Any]],
        evaluations: Any,
        certified: bool,
        prior_site: str | None = None,
        walls: int = 0,
    ):
        super().__init__(
            entry | {"evaluations": int(count)} for entry, count in zip(entries, evaluations, strict=False)
        )
        self.certified, self.prior_site, self.walls = certified, prior_site, walls

    @property
    def asserted(self) -> bool:
        """Whether all is proved but the continuity of functions for which the user vouches."""
        open_questions = [entry for entry in self if not entry.get("certified", True)]
        return bool(open_questions) and all("ASSERTED" in entry.get("continuity", "") for entry in open_questions)

    def __str__(self) -> str:
        head = "Event times are exact under the proofs below." if self.certified else "Event times are NOT certified."
        if self.asserted:
            head += f" {ASSERTED[0].upper()}{ASSERTED[1:]}."
        lines = [f"{head} This says nothing about convergence."]
        if self.walls:
            lines.append(
                f"constraints: {self.walls} walls, at which the coordinator reflects every path when it meets them"
            )
        # Sites with the same proof are named together.
        alike: dict[str, list[dict[str, Any]]] = {}
        for entry in self:
            proof = entry | {"site": entry["site"] == self.prior_site, "evaluations": 0}
            alike.setdefault(repr(proof), []).append(entry)
        for entries in alike.values():
            entry, counts = entries[0], [one["evaluations"] for one in entries]
            names = [f"{x['site']} (coordinator)" if x["site"] == self.prior_site else x["site"] for x in entries]
            domain = f", {entry['domain']}" if entry.get("domain") else ""
            lines.append(f"{', '.join(names)}: {entry['clock']}{domain}")
            for key in ("model", "continuity", "rounding"):
                if key in entry:
                    lines.append(f"  {key}: {entry[key]}")
            if any(counts):
                lines.append(f"  evaluations: {', '.join(f'{count:,}' for count in counts)}")
            for key, title in zip(("primitives", "functions", "taught"), TITLES, strict=True):
                if entry.get(key):
                    lines.append(f"  {title}: {', '.join(entry[key])}")
        return "\n".join(lines)
