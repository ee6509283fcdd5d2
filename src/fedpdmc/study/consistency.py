"""Consistency of the tables of a contract with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.members.site import NO_LATENT_BUDGET
from fedpdmc.privacy.noise_shares import check_honest
from fedpdmc.privacy.schedule import ONE_SHOT, PRIVATE_LAPLACE

if TYPE_CHECKING:
    from fedpdmc.study.contract import Study

# Releases of derivatives without noise.
EXACT = ("summed", "own")
# In a sum of two, each site knows the other's part.
LEAST_SUMMED = 3
# Number of points at which a private answer in one shot evaluates derivatives.
POINTS = len(ONE_SHOT.steps)


def _check_parameters(study: Study) -> None:
    """Check the table [coordinates]."""
    if study.parameters and study.model is not None:
        raise InputError("study.toml: coordinates", f"a table, with family {study.family!r}", "Leave the table out.")
    if study.parameters and study.unknown_scale:
        raise InputError("study.toml: model: scale", "no value, with a table [coordinates]", "Give a known scale.")
    for site, own in study.parameters.items():
        if len(set(own)) != len(own) or not set(own) <= set(study.names):
            raise InputError(
                f"study.toml: coordinates: {site}", repr(list(own)), f"Name each once, among {', '.join(study.names)}."
            )
    local = study.one_shot or (study.kind in ("ZigZag", "FactorisedBoomerang") and study.reference == "none")
    if study.parameters and not local:
        raise InputError(
            "study.toml: coordinates",
            f"{study.kind} with reference = {study.reference!r}",
            "Only flips in the parameters' own coordinates are local: use kind = 'ZigZag' with reference = 'none', or "
            "remove the table.",
        )


def _check_effects(study: Study) -> None:
    """Check the requirements of effects that stay at their sites."""
    if study.effects is None:
        return
    slope = study.effects.formula.slope
    moved = slope is not None and (study.columns[slope].center or study.columns[slope].scale != 1)
    for field, found, right, remedy in (
        ("privacy", "a budget", study.epsilon is None, NO_LATENT_BUDGET),
        ("dynamics: kind", study.kind, study.kind == "Boomerang", "Private effects rotate: use kind = 'Boomerang'."),
        (
            "dynamics: reference",
            repr(study.reference),
            study.reference != "none" and study.control == "quadratic",
            "Use reference = 'vb' or 'laplace' with control = 'quadratic'.",
        ),
        ("coordinates", "a table", not study.parameters, "All sites share all parameters: leave the table out."),
        ("releases: assessment", "some", not study.assessment, "It is not known with effects: leave it out."),
        ("prior", "flat", study.prior_scale is not None, "Give a scale of the coefficients."),
        (
            "model: units",
            f"'original' with a varying coefficient of {slope!r}, which is centred or scaled",
            study.units != "original" or not moved,
            "Declare the column without center and scale, or use units = 'declared'.",
        ),
    ):
        if not right:
            raise InputError(f"study.toml: {field}", f"{found} with effects of groups", remedy)


def check_together(study: Study) -> None:
    """Raise `InputError` for tables that contradict each other."""
    _check_effects(study)
    if study.model is None:
        study.design.check_response(study.family)
    elif study.assessment and study.model_file is not None:
        raise InputError(
            "study.toml: releases: assessment",
            f"{', '.join(study.assessment)}, with a model file",
            "It needs the law of the response, which a model file does not say: use a family, or leave it out.",
        )
    _check_parameters(study)
    if study.units == "original" and study.naming is None:
        raise InputError(
            "study.toml: model: units",
            "'original' with centred columns whose centring cannot be undone",
            "Add the main effects of every interaction and an intercept, or remove center from the columns.",
        )
    normal = study.normal_names
    for name, value in (("mean", study.prior_mean), ("scale", study.prior_scale)):
        if isinstance(value, tuple) and len(value) != len(normal):
            raise InputError(
                f"study.toml: prior: {name}", f"{len(value)} numbers", f"Give one for each of {', '.join(normal)}."
            )
    _check_scales(study)
    if (study.reference != "none" or study.control != "none") and study.derivatives == "none":
        raise InputError(
            "study.toml: releases: derivatives",
            f"'none' with reference = {study.reference!r} and control = {study.control!r}",
            "Allow derivatives = 'summed', 'own' or, under a budget, 'noisy'; or set reference and control to 'none'.",
        )
    if study.derivatives == "summed" and len(study.sites) < LEAST_SUMMED:
        raise InputError(
            "study.toml: releases: derivatives",
            f"'summed' over {len(study.sites)} sites",
            f"Use at least {LEAST_SUMMED} sites: in a sum of two, each knows the other's part.",
        )
    _check_private(study)
    if study.control != "none" and study.reference == "none":
        raise InputError(
            "study.toml: dynamics: control", repr(study.control), "It needs reference = 'vb' or 'laplace'."
        )


def _check_scales(study: Study) -> None:
    """Check priors with scales of their own."""
    if not study.scaled_prior:
        return
    named = [*study.prior_df, *study.prior_horseshoe]
    if not set(named) <= set(study.names) or len(set(named)) != len(named):
        raise InputError(
            "study.toml: prior", f"student_t or horseshoe of {', '.join(named)}",
            f"Name each once, among {', '.join(study.names)}.",
        )  # fmt: skip
    if study.prior_scale is None:
        raise InputError("study.toml: prior", "flat, with student_t or horseshoe", "Give mean and scale.")
    for what, there in (
        ("a privacy budget", study.epsilon is not None),
        ("a table [coordinates]", bool(study.parameters)),
        ("effects of groups", study.effects is not None),
    ):
        if there:
            raise InputError("study.toml: prior", f"student_t or horseshoe with {what}", "Give a normal prior.")
    mean = np.broadcast_to(study.prior_mean, len(study.names))
    if any(mean[study.names.index(name)] != 0 for name in study.prior_horseshoe):
        raise InputError("study.toml: prior: mean", "not zero of a parameter of the horseshoe", "Set it to 0.")


def _check_one_shot(study: Study) -> None:
    """Check the requirements of a private answer from noisy derivatives alone."""
    for field, found, right, remedy in (
        ("privacy", "nothing", study.epsilon is not None, "Give epsilon and delta."),
        (
            "releases: derivatives",
            repr(study.derivatives),
            study.noisy,
            "Set derivatives = 'noisy' or, on a secure sum, 'noisy-summed'.",
        ),
        (
            "coordinates",
            "a table with derivatives = 'noisy-summed'",
            not study.parameters or not study.summed,
            "A sum needs all sites in all parameters: leave it out, or set derivatives = 'noisy'.",
        ),
        ("prior", "flat", study.prior_scale is not None, "Give a scale: noise can leave a direction unknown."),
        ("limits: derivatives", str(study.most_derivatives), study.most_derivatives >= POINTS, f"Allow {POINTS}."),
    ):
        if not right:
            raise InputError(f"study.toml: {field}", f"{found} with [run] method = {study.method!r}", remedy)


def _check_shared_noise(study: Study) -> None:
    """Check the requirements of noise that sites share."""
    if (study.derivatives == "noisy-summed") != (study.colluding is not None):
        raise InputError(
            "study.toml: privacy: colluding",
            f"{'nothing' if study.colluding is None else study.colluding} with derivatives = {study.derivatives!r}",
            "Say how many sites may collude with the coordinator if, and only if, derivatives = 'noisy-summed'.",
        )
    if study.colluding is None:
        return
    check_honest("study.toml: privacy: colluding", len(study.sites), study.colluding)
    if not study.one_shot:
        raise InputError(
            "study.toml: releases: derivatives",
            "'noisy-summed' with arrivals",
            f"It is for [run] method = {PRIVATE_LAPLACE!r}: with arrivals use 'noisy'.",
        )


def _check_private_model(study: Study) -> None:
    """Check the requirements of a budget for a model of one record: bounded derivatives on all that is declared."""
    assert study.model is not None
    for field, found, right, remedy in (
        (
            "privacy: neighbours",
            repr(study.neighbours),
            study.neighbours != "label",
            "Use 'replace' or 'add-remove': a model does not say which columns are outcomes.",
        ),
        ("privacy: region", "nothing", study.region is not None, "Say where the parameters stay: region = 3.0."),
        ("model: group", "groups of rows", not study.model.group, "Budgets need one row for each record."),
    ):
        if not right:
            raise InputError(f"study.toml: {field}", f"{found} with a budget and family {study.family!r}", remedy)


def _check_private(study: Study) -> None:
    """Check the requirements of a privacy budget."""
    one_shot = study.one_shot
    _check_shared_noise(study)
    if one_shot:
        _check_one_shot(study)
    elif (study.derivatives == "noisy") != (study.release > 0):
        raise InputError(
            "study.toml: releases: derivatives",
            f"{study.derivatives!r} with release = {study.release:g}",
            "Noisy derivatives cost a share of a privacy budget: set derivatives = 'noisy', and privacy: release = 0.1.",
        )
    if study.epsilon is None:
        return
    if study.model is not None:
        _check_private_model(study)
    if study.unknown_scale:
        raise InputError(
            "study.toml: model: scale",
            "no value, with a privacy budget",
            "The gradient of a linear regression with an unknown scale has no bound: give a known one.",
        )
    flips = one_shot or study.kind in ("ZigZag", "FactorisedBoomerang")
    if study.derivatives in EXACT or not flips:
        raise InputError(
            "study.toml: privacy",
            f"a budget with {study.kind} and derivatives = {study.derivatives!r}",
            "Only coordinate flips can be private, and derivatives without noise cannot: use kind = 'ZigZag' or "
            "'FactorisedBoomerang' with derivatives = 'none' or 'noisy'.",
        )
    if study.neighbours == "label" and study.missing == "drop":
        raise InputError(
            "study.toml: missing",
            "'drop' with neighbours = 'label'",
            "Which records are complete would depend on outcomes, and covariates are public there: set missing = 'refuse', "
            "or neighbours = 'replace'.",
        )
    if study.assessment:
        raise InputError(
            "study.toml: releases: assessment",
            "some, with a budget",
            "No budget covers them: remove it from the contract.",
        )
    if study.passes:
        raise InputError(
            "study.toml: releases: passes", "true with a budget", "No budget covers them: set passes = false."
        )
