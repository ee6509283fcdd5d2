"""The certificate: what was proved, by site, saved with the posterior."""

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

import fedpdmc as fp
from fedpdmc.enclosures.interpreter import TAUGHT
from fedpdmc.results.exactness_certificate import Certificate, certificate

DATA = np.random.default_rng(0).normal(size=12)


def robust(x, y):
    return jnp.sum(jnp.logaddexp(0.0, y * x[0]) + jnp.abs(y - x[0])) + 0.5 * x[0] ** 2


def run(tmp_path, **options):
    sites = [fp.Site(robust, name="a", data=DATA), fp.Site(fp.models.gaussian_mean(DATA[:, None]), name="b")]
    post = fp.sample(
        sites,
        fp.models.normal_prior(1),
        dynamics=fp.ZigZag(),
        reference="identity",
        chains=2,
        duration=4.0,
        seed=1,
        **options,
    )
    post.save(tmp_path / "post")
    return post, fp.load(tmp_path / "post")


def test_every_site_says_what_was_proved_and_it_is_saved(tmp_path, monkeypatch):
    post, again = run(tmp_path)
    first, second = post.certificate
    assert list(again.certificate) == list(post.certificate)
    assert first["clock"] == "TimePolynomial" and first["continuity"] == "shown"
    assert {"abs", "sign"} & set(first["primitives"]) and first["functions"] == ["logaddexp"] and not first["taught"]
    assert first["evaluations"] == post.gradient_evaluations[0] > 0
    assert second["model"].startswith("built in")
    words = str(again.certificate)
    assert "says nothing about convergence" in words and "known as a whole: logaddexp" in words
    assert str(Certificate([], [], False)).startswith("Event times are NOT certified")
    alike = [{"site": name, "clock": "DenseClock", "model": model} for name, model in zip("abc", "xyx", strict=True)]
    assert str(Certificate(alike, [3, 4, 1500], True)).split("\n")[1:] == [
        "a, c: DenseClock", "  model: x", "  evaluations: 3, 1,500", "b: DenseClock", "  model: y", "  evaluations: 4",
    ]  # fmt: skip
    # A rule that a user has taught stands apart from those that are proved here.
    monkeypatch.setattr(sys.modules["fedpdmc.enclosures.interpreter"], "TAUGHT", TAUGHT | {"mul"})
    sampler: Any = post.run
    clocks = sampler.engine.federation.clocks
    (taught, _) = certificate(["a", "b"], clocks)
    assert taught["taught"] == ["mul"] and "mul" not in taught["primitives"]
    assert certificate(["far"], {}) == [{"site": "far", "clock": "at the site"}]


def test_walls_are_told_and_saved(tmp_path):
    post = fp.sample(
        fp.Site(robust, name="a", data=DATA), fp.models.normal_prior(1), dynamics=fp.ZigZag(), reference="identity",
        chains=2, duration=4.0, seed=1, constraints=([[1.0]], [2.0]),
    )  # fmt: skip
    post.save(tmp_path / "post")
    again = fp.load(tmp_path / "post").certificate
    assert list(again) == list(post.certificate) and str(again) == str(post.certificate)
    assert "constraints: 1 walls" in str(again)
