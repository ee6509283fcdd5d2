"""Sampling of a study over its connection: started, stored after every block, and resumed."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.federation.derivative_plausibility import doubts
from fedpdmc.federation.derivative_rounding import TOLERANCE
from fedpdmc.federation.joint_plans import JointRandomness, joint_seed
from fedpdmc.federation.remote import AGREEMENT, SUM, RemoteFederation, RemoteSite
from fedpdmc.federation.session import Connection
from fedpdmc.members.private_site import account_report
from fedpdmc.members.run_coordinates import local_columns
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.privacy.accountant import AccountStatus
from fedpdmc.privacy.gaussian_mechanism import shared_words
from fedpdmc.results.manifest import RESTORE
from fedpdmc.results.path_store import RunState
from fedpdmc.results.posterior import Posterior
from fedpdmc.results.skeleton import Block, Skeleton
from fedpdmc.sampling.arguments import Settings
from fedpdmc.sampling.coordinator import PublicKeys
from fedpdmc.sampling.defaults import Method, choose
from fedpdmc.sampling.driver import Goal, Sampler
from fedpdmc.sampling.engines import one_round
from fedpdmc.sampling.factory import coordinator, coordinator_key, opening
from fedpdmc.sampling.laplace_reference import search_laplace
from fedpdmc.sampling.one_shot import exact_cost, exact_words, private_laplace
from fedpdmc.sampling.run_state_arrays import pack_position, pack_reference, unpack_position, unpack_reference
from fedpdmc.sampling.vb_reference import reference_at, search_vb
from fedpdmc.study.description import effect_scale, prior_lines
from fedpdmc.whitening import VB, Reference

if TYPE_CHECKING:
    from fedpdmc.study.contract import Study


class RunRecorder:
    """Writes a run to its store: every block, and the state between blocks."""

    def __init__(self, connection: Connection):
        self.connection = connection
        # What each site does to the posterior.
        self.weights: dict[str, dict[str, Any]] = {}
        # Bits that the answers of each site have carried.
        self.information: dict[str, float] = {}

    def block(self, block: Block | Skeleton) -> None:
        """Store a block's knots."""
        if self.connection.checkpoint is not None:
            self.connection.checkpoint.append(block)

    def between_blocks(self, sampler: Sampler) -> None:
        """Have the sites' logs sealed, and replace the stored state."""
        self.connection.seal_logs()
        connection = self.connection
        if connection.checkpoint is None or sampler.goal is None:
            return
        facts, arrays = pack_reference(sampler.method.reference)
        joint = connection.federation.joint
        arrays |= pack_position(sampler.position()) | {"bytes": np.asarray(connection.federation.bytes)}
        connection.checkpoint.write(
            {
                **connection.facts,
                "sequence": connection.federation.sequence.tolist(),
                "keep": sampler.keep,
                "accounts": {
                    name: [one.dim, one.remaining, one.numbers(), one.observed]
                    for name, one in connection.federation.account.items()
                },
                "burn_in": sampler.burn_in_time,
                "goal": list(sampler.goal),
                "reference": facts,
                "weights": self.weights,
                "joint": joint and [[x.hex() for x in part] for part in (joint.seeds, joint.evidence, joint.publics)],
            },
            arrays,
        )

    def status(self) -> str:
        """The state of the sites' connections and privacy budgets."""
        spent = [f"{one.site} {100 * one.spent:.3g} %" for one in self.connection.federation.accounts]
        words = [self.connection.transport.status(), *(["privacy spent: " + ", ".join(spent)] if spent else [])]
        return "; ".join(word for word in words if word)

    def privacy(self) -> dict[str, Any] | None:
        """The privacy account of every site, from its answers; None without a budget."""
        connection = self.connection
        study, federation = connection.study, connection.federation
        budgets = {name: study.budget(site=name) for name in federation.account}
        # Only the site knows the data set's name in its ledger.
        where = {"dataset": None, "study": study.name, "run": connection.run.hex()}
        told = {
            name: account_report(federation.account[name], budget, study.dynamics()) | where
            for name, budget in budgets.items()
            if budget is not None
        }
        return told or None

    def facts(self) -> dict[str, Any]:
        """Which study and run this is."""
        study = self.connection.study
        known = {"study": study.name, "contract": study.digest.hex(), "run": self.connection.run.hex()}
        known |= {"prior": prior_lines(study), "effect_scale": effect_scale(study), "information": self.information}
        # Regressions of the other families have one mode.
        known |= {"modes_searched": False} if study.family in ("file", "student_t") else {}
        return known | {"influence": self.weights, "doubts": doubts(self.weights)}


def sample_study(
    connection: Connection, *, ess: float | None, duration: float | None, keep: str, progress: bool
) -> Posterior:
    """Sample a study's posterior, from the start or from the stored state.

    ``ess`` or ``duration`` replace those of the contract. Its limits still apply.
    """
    study, saved = connection.study, connection.saved
    connection.federation.rewind()
    if study.one_shot:
        return _one_shot(connection, ess, duration)
    if ess is None and duration is None:
        ess, duration = study.ess, study.duration
    begun = saved is not None and "goal" in saved.facts
    if begun and saved is not None:
        check_state(study, saved)
    if begun and saved and saved.facts["keep"] != keep:
        raise InputError("keep", repr(keep), f"The run in this store was started with keep={saved.facts['keep']!r}.")
    method = _method(connection, saved if begun else None, keep)
    recorder, federation = RunRecorder(connection), connection.federation
    if federation.plausible is not None:
        recorder.weights = saved.facts.get("weights", {}) if begun and saved else federation.plausible.weigh_sites()
    federation.flips, federation.private = study.dynamics().flips, study.epsilon is not None
    elsewhere = method.sites[: len(federation.names)]
    federation.columns = [local_columns(site, opening(method, site)) for site in elsewhere]
    federation.needs_time = study.effects is not None
    burn_in = saved.facts["burn_in"] if begun and saved else method.burn_in(study.burn_in, duration)
    if study.sites_plan:
        federation.joint = JointRandomness(study, connection.seed)
        method = _without_starts(method, study)
    if not begun:
        summed = study.derivatives == "summed"
        control = [method.control.get(SUM if summed else name) for name in federation.names]
        # A site that is not in every round also gets the last velocity, for the time after the plan.
        segments = method.segments + one_round.applies(federation.columns, coordinator(method))
        federation.open(method.reference, control, method.chains, segments, summed, _turn_key(study, method), -burn_in)
    elif saved is not None:
        federation.turning = method.dynamics.turns
        if federation.joint is not None:
            federation.joint.seeds, federation.joint.evidence, *publics = _unpack_joint(saved)
            federation.joint.publics = publics[0] if publics else ()
        _restore_accounts(connection, saved)
    if federation.joint is not None:
        method = method.replace(seed=joint_seed(federation.joint.seeds))
    sampler = Sampler(method, burn_in, keep, recorder)
    if begun and saved is not None:
        _restore(sampler, connection, saved)
        if not sampler.resume(progress):
            return sampler.posterior()
    else:
        sampler.check_budget(burn_in + (duration or 0.0))
        if burn_in > 0:
            sampler.burn_in(progress, duration, ess)
    connection.saved = None
    post = sampler.to_length(duration, ess, progress)
    asked = np.asarray(saved.facts["sequence"]) if begun and saved is not None else 0
    if study.epsilon is None and (federation.sequence > asked).any():
        recorder.information = post.settings["information"] = federation.information()
    if federation.plausible is not None:
        federation.plausible.check_posterior(post.mean(), np.sqrt(np.diag(post.cov())))
    return post


def _without_starts(method: Method, study: Study) -> Method:
    """The method of a run whose plans sites make: they know the reference, and its chains start from it."""
    if study.control == "quadratic" and method.dynamics.flow.rotating and method.public is not None:
        remedy = "The sites cannot make the plans of such a run: use kind = 'ZigZag' with reference = 'none'."
        raise InputError("study.toml: dynamics", "rotations, and a posterior whose curvature is not positive", remedy)
    return method.replace(reference=dataclasses.replace(method.reference, starts=None))


def _unpack_joint(saved: RunState) -> list[tuple[bytes, ...]]:
    return [tuple(bytes.fromhex(x) for x in part) for part in saved.facts["joint"]]


def _turn_key(study: Study, method: Method) -> np.ndarray | None:
    """The public key of the turns; empty if it follows from the seeds of all parties."""
    if not method.dynamics.turns:
        return None
    if study.sites_plan:
        return np.zeros(0, np.uint32)
    return np.asarray(jax.random.key_data(PublicKeys.turn_key(coordinator_key(method))), np.uint32)


def _one_shot(connection: Connection, ess: float | None, duration: float | None) -> Posterior:
    """Draws from noisy derivatives at four points. Repeated requests get the same answers at no charge."""
    if ess is not None or duration is not None:
        raise InputError(
            "ess or duration",
            "a number",
            "The contract's method is 'private-laplace', which has neither: omit them.",
        )
    study = connection.study
    federation = connection.federation
    post = private_laplace(_members(connection), study.prior(), study.names, connection.seed)
    recorder = RunRecorder(connection)
    post.privacy, post.settings = recorder.privacy(), post.settings | recorder.facts()
    post.settings["sites"] = list(federation.names)
    if study.model is None:
        scale, count = np.linalg.cholesky(post.cov()), len(study.sites)
        post.settings["chosen"] += exact_words(
            min(
                exact_cost(study.declared_model(site), study.budget(site=site), _own_rows(study, site, scale), count)
                for site in study.sites
            )
        )
    if study.derivatives == "noisy-summed":
        post.settings["chosen"] += f" {shared_words(len(study.sites), study.colluding or 0)}"
        post.rounds += AGREEMENT
    post.bytes, post.messages = np.array(federation.bytes), 2 * np.array(federation.sequence)
    return post


def _own_rows(study: Study, site: str, scale: np.ndarray) -> np.ndarray:
    own = study.coordinates(site)
    return scale if own is None else scale[own]


def _members(connection: Connection) -> list[RemoteSite]:
    study, federation = connection.study, connection.federation
    budget = study.budget() if study.noisy else None
    bounds = None if budget is None else budget.bounds
    if study.derivatives == "noisy-summed":
        # Only the sum of all sites is known.
        together = RemoteSite(federation, None, len(study.names), bounds)
        together.naming = study.naming
        return [together]
    own = [study.coordinates(name) for name in federation.names]
    federation.coordinates = [None if one is None else np.asarray(one) for one in own]
    members = [
        RemoteSite(federation, index, len(study.names), bounds, study.coordinates(name))
        for index, name in enumerate(federation.names)
    ]
    for site in members:
        site.guess, site.naming = study.guess, study.naming
        site.latents, site.spreads = int(study.effects is not None), _spreads(study)
    return members


def _spreads(study: Study) -> tuple[int, ...]:
    """The places of log spreads among the parameters."""
    return () if study.effects is None else study.effects.spreads(len(study.names))


def _method(connection: Connection, saved: RunState | None, keep: str) -> Method:
    study, federation, members = connection.study, connection.federation, _members(connection)
    reference: Any = "identity" if study.reference == "none" else study.reference
    if saved is not None:
        reference = unpack_reference(saved.facts["reference"], saved.arrays)
    elif study.reference != "none" and study.derivatives == "summed":
        together: Any = [RemoteSite(federation, None, len(study.names))]
        together[0].guess, together[0].spreads = study.guess, _spreads(study)
        found = _mode(federation, together, study)
        asked = dict.fromkeys(federation.names, 0)
        reference = dataclasses.replace(found, rounds=found.rounds + AGREEMENT, bytes=asked)
    elif study.reference != "none" and study.derivatives == "own":
        reference = _mode(federation, members, study)
    return choose(
        Settings(
            sites=members,
            prior=study.prior(),
            dynamics=study.dynamics(),
            reference=reference,
            control=study.control,
            chains=study.chains,
            seed=connection.seed,
            keep=keep,
            names=study.names,
        )
    )


def _mode(federation: RemoteFederation, members: Any, study: Study) -> Reference:
    """The reference, of derivatives on the grid of releases."""
    words = members, study.prior(), TOLERANCE, None, study.reach, study.names
    found, x, spread = (
        search_vb(*words, bend=True, points=study.most_derivatives) if study.reference == VB else search_laplace(*words)
    )
    before = int(federation.sequence.max())
    made = reference_at(members, study.prior(), x, spread, study.names, found)
    if federation.plausible is not None and len(members) > 1:
        for doubt in doubts(federation.plausible.weigh_sites()):
            warnings.warn(doubt, stacklevel=2)
    traffic = {name: size + (made.bytes or {}).get(name, 0) for name, size in (found.bytes or {}).items()}
    # Sites are not asked again for what they have answered last.
    again = int(federation.sequence.max()) - before
    return dataclasses.replace(made, rounds=found.rounds + again, bytes=traffic)


def check_state(study: Study, saved: RunState) -> None:
    """Refuse a stored state that is not one of this study, before anything is done with it."""
    chains, dim = study.chains, len(study.names)
    facts = saved.facts
    try:
        reference, position = unpack_reference(facts["reference"], saved.arrays), unpack_position(saved.arrays)
        state, goal, begun = position.chains, Goal(*facts["goal"]), facts["burn_in"]
        good = facts["keep"] in ("skeleton", "draws") and all(np.isfinite([*goal, begun]))
        good = good and reference.center.shape == (dim,) and reference.scale_tril.shape in ((dim,), (dim, dim))
        good = good and all(one.shape == (chains, dim) for one in (state.a, state.v)) and position.rounds >= 0
        good = good and all(one.shape == (chains,) for one in (state.t, state.number, state.events))
        prior = study.prior()
        held = prior.law.start(chains).shape if isinstance(prior, MixturePrior) else ()
        good = good and (() if state.scales is None else state.scales.shape) == held
        if study.sites_plan:
            good = good and len(_unpack_joint(saved)[0]) == len(study.sites) + 1
        good = good and np.shape(facts["sequence"]) == np.shape(saved.arrays["bytes"]) == (len(study.sites),)
        for name, one in facts["accounts"].items():
            AccountStatus.from_numbers(name, *one)
    except Exception as error:
        # The state was written by someone else: arrays and facts may be anything.
        raise InputError("store", f"a state that cannot be read ({type(error).__name__})", RESTORE) from error
    if not good:
        raise InputError("store", "a state that is not one of this study", RESTORE)


def _restore_accounts(connection: Connection, saved: RunState) -> None:
    """Restore the sites' budgets as they were last reported."""
    told = saved.facts["accounts"]
    connection.federation.account = {name: AccountStatus.from_numbers(name, *one) for name, one in told.items()}


def _restore(sampler: Sampler, connection: Connection, saved: RunState) -> None:
    """Restore a sampler from the stored state."""
    assert connection.checkpoint is not None
    sampler.restore(unpack_position(saved.arrays))
    sampler.goal = Goal(*saved.facts["goal"])
    connection.checkpoint.fill(sampler.store)
    connection.federation.sequence = np.asarray(saved.facts["sequence"], dtype=np.int64)
    connection.federation.bytes = saved.arrays["bytes"]
    # A prior that the coordinator walks with comes after the sites.
    connection.federation.passes = saved.arrays["passes"][: len(connection.federation.names)]
