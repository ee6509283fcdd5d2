import json
import shutil

import jax.numpy as jnp
import numpy as np
import pandas
import pytest
import zarr
from tests.paths import integrals
from tests.support import default_run, zigzag_run

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.results import manifest
from fedpdmc.results.diagnostics import effective_sizes
from fedpdmc.sampling.run_cost import message_bytes

RUNS = [default_run, zigzag_run]


def drawn_run():
    return zigzag_run("draws")


def test_names_are_given_or_numbered():
    assert default_run().names == ["slope", "other"]
    assert zigzag_run().names == ["x0", "x1"]


@pytest.mark.parametrize("make", RUNS)
def test_mean_and_cov_are_the_path_integrals_in_the_parameters_coordinates(make):
    post = make()
    first, second = integrals(post.skeleton, post.dynamics.flow.rotating)
    time = post.chains * post.duration
    center, scale = np.asarray(post.reference.center), np.asarray(post.reference.matrix)
    a = first / time
    np.testing.assert_allclose(post.mean(), center + scale @ a, rtol=1e-9)
    np.testing.assert_allclose(post.cov(), scale @ (second / time - np.outer(a, a)) @ scale.T, rtol=1e-9)
    np.testing.assert_array_equal(post.cov(), post.cov().T)


@pytest.mark.parametrize("make", RUNS)
def test_expectations_of_polynomials_are_the_moments(make):
    post = make()
    np.testing.assert_allclose(post.expectation(lambda x: x), post.mean(), rtol=1e-8)
    square = post.expectation(lambda x: jnp.outer(x, x))
    np.testing.assert_allclose(square - np.outer(post.mean(), post.mean()), post.cov(), rtol=1e-6)
    assert post.expectation(lambda x: 1.0) == pytest.approx(1.0, rel=1e-12)
    assert post.expectation(lambda x: x[0]).shape == ()


@pytest.mark.parametrize("make", RUNS)
def test_expectations_of_other_functions_agree_with_many_draws(make):
    post = make()
    found = post.expectation(lambda x: jnp.exp(0.3 * x))
    np.testing.assert_allclose(found, np.exp(0.3 * post.draws(20_000)).mean((0, 1)), rtol=1e-3)


@pytest.mark.parametrize("make", [*RUNS, drawn_run])
def test_draws_are_equally_spaced_over_the_span_of_all_chains(make):
    post = make()
    draws = post.draws(100)
    assert draws.shape == (4, 100, 2)
    center, scale = np.asarray(post.reference.center), np.asarray(post.reference.matrix)
    np.testing.assert_allclose(draws, center + post.store.draws(100) @ scale.T, rtol=1e-12)
    if make is not drawn_run:
        # The middles of a hundred intervals: also every third of the middles of three hundred.
        np.testing.assert_allclose(post.draws(300)[:, 1::3], draws, atol=1e-10)


@pytest.mark.parametrize("n", [0, -1, 2.5, "many"])
def test_a_number_of_draws_that_is_none_is_refused(n):
    with pytest.raises(InputError, match=r"draws\(n\)"):
        zigzag_run().draws(n)


@pytest.mark.parametrize("make", [*RUNS, drawn_run])
def test_diagnostics_cover_every_parameter_and_the_energy(make):
    post = make()
    assert list(post.ess()) == list(post.rhat()) == [*post.names, "energy"]
    assert all(0 < value <= 4 * 1000 for value in post.ess().values())
    assert all(0.9 < value < 3 for value in post.rhat().values())


def test_ess_is_not_counted_above_the_number_of_draws():
    # Antithetic draws, whose mean is better than that of as many independent ones.
    draws = np.where(np.arange(200) % 2, 1.0, -1.0)[None, :, None] * np.random.default_rng(0).random((4, 200, 1))
    np.testing.assert_array_equal(effective_sizes(draws), [800.0])


@pytest.mark.parametrize("make", [*RUNS, drawn_run])
def test_counts_have_their_shapes_and_meaning(make):
    post = make()
    assert post.events.shape == (4,) and post.chains == 4
    for count in (post.messages, post.bytes, post.gradient_evaluations):
        assert count.shape == (2,) and np.all(count > 0)
    assert isinstance(post.rounds, int) and post.certified is True and post.privacy is None
    # A plan and an arrival to and from each site in every round, the making of the reference included.
    np.testing.assert_array_equal(post.messages, 2 * post.rounds)


def test_events_are_knots_that_change_the_velocity():
    path = zigzag_run().skeleton
    flips = sum(
        np.any(path.v[i] != path.v[i - 1]) for c in range(4) for i in range(path.offsets[c] + 1, path.offsets[c + 1])
    )
    assert zigzag_run().events.sum() == flips


def test_bytes_are_plans_times_their_size():
    """Of one segment each; chains that have come to the end of a block are sent no more."""
    post, size = zigzag_run(), sum(message_bytes(1, 1, 2, flips=True))
    np.testing.assert_array_equal(post.bytes % size, 0)
    assert np.all((post.rounds < post.bytes / size) & (post.bytes / size <= 4 * post.rounds))


@pytest.mark.parametrize("make", RUNS)
def test_most_plans_end_in_an_arrival_or_at_the_end_of_a_block(make):
    post = make()
    assert 0.2 < post.settings["ended_by_arrival"] <= 1.0
    assert any("of plans ended by an arrival" in note for note in post.summary().notes)


def test_settings_say_how_the_run_was_made():
    settings = default_run().settings
    assert settings["seed"] == 3 and settings["chains"] == 4 and settings["duration"] == 8.0
    assert settings["sites"] == ["north", "south"] and settings["control"] == "quadratic"
    assert settings["reference"] == "vb" and settings["dynamics"] == repr(default_run().dynamics)
    assert settings["versions"]["fedpdmc"] == fp.__version__ and "jax" in settings["versions"]
    json.dumps(settings)


def test_summary_has_a_line_for_each_parameter_and_how_the_run_went():
    table = default_run().summary()
    verdict, rows, notes = (part.splitlines() for part in str(table).split("\n\n"))
    assert " ".join(line.strip() for line in verdict) == str(default_run().verdict) == table.verdict
    assert [line.split()[0] for line in rows[1:]] == ["slope", "other"]
    energy, run, bounds = table.notes
    assert energy == notes[0] and energy.startswith("energy:")
    assert f"{default_run().rounds} rounds" in run and "Boomerang(refresh=" in run and "4 chains" in run
    # Nobody takes the bounds for convergence.
    assert bounds.startswith("event bounds: certified") and "nothing about convergence" in bounds
    assert " ".join(line.strip() for line in notes) == " ".join(table.notes)
    shown = rows[1].split()[1]
    sd = np.sqrt(default_run().cov()[0, 0])
    assert abs(float(shown) - default_run().mean()[0]) < 0.005 * sd
    assert max(map(len, [*verdict, *rows, *notes])) < 80


def test_summary_says_what_to_do_about_a_posterior_far_from_a_gaussian(monkeypatch):
    post = default_run()
    monkeypatch.setattr(post, "settings", post.settings | {"reference": "laplace", "reference_why": "averages fail"})
    (note,) = [note for note in post.summary().notes if note.startswith("Laplace reference")]
    assert "averages fail. The posterior is far from a Gaussian" in note and "logarithms of scales" in note


def test_summary_is_a_table():
    post = default_run()
    table = post.summary()
    assert list(table.columns) == ["mean", "sd", "mcse", "median", "2.5%", "97.5%", "ess", "ess_tail", "rhat"]
    assert list(table.index) == post.names
    np.testing.assert_array_equal(table["mean"], post.mean())
    np.testing.assert_array_equal(table["sd"], np.sqrt(np.diag(post.cov())))
    assert dict(table["mcse"]) == post.mcse() and dict(table["ess_tail"]).items() <= post.ess_tail().items()
    assert dict(table["ess"]) | {"energy": post.ess()["energy"]} == post.ess()
    assert dict(table["rhat"]) | {"energy": post.rhat()["energy"]} == post.rhat()
    assert type(table.head(1)) is pandas.DataFrame and "slope" in table._repr_html_()


def test_summary_has_any_level_the_shortest_interval_and_ratios():
    post = default_run()
    flat = post.draws(1000).reshape(-1, 2)
    wide = post.summary(level=0.98)
    np.testing.assert_allclose(wide[["1%", "99%"]].T, np.quantile(flat, [0.01, 0.99], axis=0), rtol=1e-12)
    short, equal = post.summary(level=0.8, interval="hdi"), post.summary(level=0.8)
    assert np.all(short["hdi_90%"] - short["hdi_10%"] <= equal["90%"] - equal["10%"])
    inside = (flat >= short["hdi_10%"].to_numpy()) & (flat <= short["hdi_90%"].to_numpy())
    np.testing.assert_allclose(inside.mean(0), 0.8, atol=1e-3)
    ratios = post.summary(exp=True)
    assert list(ratios.index) == ["exp(slope)", "exp(other)"]
    np.testing.assert_allclose(
        ratios[["median", "2.5%", "97.5%"]], np.exp(post.summary()[["median", "2.5%", "97.5%"]]), rtol=1e-3
    )
    np.testing.assert_allclose(ratios["mean"], np.exp(flat).mean(0))


@pytest.mark.parametrize(("wrong", "argument"), [({"level": 95}, "level"), ({"interval": "credible"}, "interval")])
def test_a_summary_that_cannot_be_is_refused(wrong, argument):
    with pytest.raises(InputError, match=argument):
        default_run().summary(**wrong)


def test_repr_is_short():
    assert repr(zigzag_run()) == f"Posterior(2 parameters, 4 chains, process time 10, {zigzag_run().rounds} rounds)"


def test_arviz_gets_the_draws_by_name_and_the_settings():
    data = default_run().to_arviz(draws=50)
    np.testing.assert_array_equal(data.posterior["other"].values, default_run().draws(50)[..., 1])
    assert json.loads(data.attrs["fedpdmc"])["seed"] == 3
    assert list(data.posterior.data_vars) == ["slope", "other"]
    assert data.sample_stats["energy"].shape == (4, 50) and data.attrs["verdict"] == str(default_run().verdict)


@pytest.mark.parametrize("chains", [1, 2, 3])
def test_arviz_gets_few_chains_laid_end_to_end(chains):
    data = default_run().to_arviz(draws=50, chains=chains)
    shown = data.posterior["slope"].values
    assert shown.shape[0] == chains and 50 <= shown.shape[1] < 60
    np.testing.assert_array_equal(shown.ravel(), default_run().draws(shown.size // 4)[..., 0].ravel())


@pytest.mark.parametrize("make", [*RUNS, drawn_run])
def test_a_saved_posterior_comes_back_the_same(make, tmp_path):
    post = make()
    post.save(tmp_path / "run.zarr")
    back = fp.load(tmp_path / "run.zarr")
    assert back.names == post.names and back.settings == json.loads(json.dumps(post.settings))
    assert repr(back.dynamics) == repr(post.dynamics) and back.duration == post.duration
    for name in ("rounds", "messages", "bytes", "events", "gradient_evaluations", "certified", "privacy"):
        np.testing.assert_array_equal(getattr(back, name), getattr(post, name))
    np.testing.assert_array_equal(back.mean(), post.mean())
    np.testing.assert_array_equal(back.cov(), post.cov())
    np.testing.assert_array_equal(back.draws(100), post.draws(100))
    assert back.ess() == post.ess() and str(back.summary()) == str(post.summary())


def test_a_posterior_of_another_format_is_refused(tmp_path):
    zigzag_run().save(tmp_path / "run.zarr")
    zarr.open_group(str(tmp_path / "run.zarr"), mode="r+").attrs["format"] = 3
    manifest.write(tmp_path / "run.zarr")
    with pytest.raises(InputError, match="format 3. This version of fedpdmc reads format 4"):
        fp.load(tmp_path / "run.zarr")


def damaged(path, how):
    """One file of a saved posterior lost, altered in one bit, or added."""
    chunk = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json")[-1]
    if how == "missing":
        chunk.unlink()
    elif how == "changed":
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        chunk.write_bytes(data)
    elif how == "symbolic link":
        chunk.rename(path.parent / "elsewhere")
        chunk.symlink_to(path.parent / "elsewhere")
    elif how == "which its manifest does not have":
        chunk = chunk.with_name("extra")
        chunk.write_bytes(b"")
    elif how == "manifest.json missing":
        (path / "manifest.json").unlink()
        return "manifest.json"
    elif how == "manifest.json changed":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace(text.split('"')[5], "0" * 64))
        return "manifest.json"
    elif how == "cannot be read":
        (path / "manifest.json").write_text("[" * 100_000)
        return "manifest.json"
    return chunk.name


DAMAGE = (
    "missing", "changed", "symbolic link", "which its manifest does not have", "manifest.json missing",
    "manifest.json changed", "cannot be read",
)  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("make", [zigzag_run, drawn_run])
def test_a_damaged_posterior_is_not_loaded_and_the_file_is_named(make, how, tmp_path):
    make().save(tmp_path / "run.zarr")
    name = damaged(tmp_path / "run.zarr", how)
    with pytest.raises(InputError) as error:
        fp.load(tmp_path / "run.zarr")
    assert name in error.value.found and how in error.value.found


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["settings"].pop("duration"),
        lambda told: told["names"].append("another"),
        lambda told: told["names"].__setitem__(0, told["names"][-1]),
        lambda told: told["names"].__setitem__(0, "\x1b[2J"),
        lambda told: told["dynamics"].update(kind="Line", rates={}),
        lambda told: told["dynamics"].update(kind="flows", rates={}),
    ],
)
def test_a_posterior_that_somebody_made_up_is_refused_when_it_is_loaded(tmp_path, change):
    """With a manifest that fits."""
    path = tmp_path / "run.zarr"
    zigzag_run().save(path)
    file = path / "zarr.json"
    told = json.loads(file.read_text())
    change(told["attributes"])
    file.write_text(json.dumps(told))
    (path / manifest.NAME).unlink()
    manifest.write(path)
    with pytest.raises(InputError, match="cannot be read"):
        fp.load(path)


def test_a_folder_of_the_second_zarr_format_is_not_read(tmp_path):
    """Its codecs are looked up by the names that the file gives."""
    zarr.open_group(str(tmp_path / "run.zarr"), mode="w", zarr_format=2).attrs["format"] = 2
    with pytest.raises(InputError, match=r"load\(path\)"):
        fp.load(tmp_path / "run.zarr")


def test_who_is_killed_while_saving_leaves_what_was_there(tmp_path, monkeypatch):
    zigzag_run().save(tmp_path / "run.zarr")
    monkeypatch.setattr("fedpdmc.results.manifest.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        drawn_run().save(tmp_path / "run.zarr")
    np.testing.assert_array_equal(fp.load(tmp_path / "run.zarr").mean(), zigzag_run().mean())
    monkeypatch.undo()
    drawn_run().save(tmp_path / "run.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["run.zarr"]


def test_saving_again_replaces_the_first(tmp_path):
    default_run().save(tmp_path / "run.zarr")
    drawn_run().save(tmp_path / "run.zarr")
    np.testing.assert_array_equal(fp.load(tmp_path / "run.zarr").mean(), drawn_run().mean())


def test_saving_over_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="save"):
        zigzag_run().save(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_saving_over_a_file_is_refused(tmp_path):
    (tmp_path / "run.zarr").write_text("not a folder")
    with pytest.raises(InputError, match="save"):
        zigzag_run().save(tmp_path / "run.zarr")


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_rubbish_is_not_loaded(kind, tmp_path):
    path = tmp_path / "run.zarr"
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("rubbish")
    with pytest.raises(InputError, match=r"load\(path\).*Posterior.save"):
        fp.load(path)


@pytest.mark.parametrize("lost", ["knots", "velocities", "center", "zarr.json"])
def test_half_a_posterior_is_not_loaded(lost, tmp_path):
    path = tmp_path / "run.zarr"
    zigzag_run().save(path)
    if lost == "zarr.json":
        attributes = json.loads((path / lost).read_text())
        del attributes["attributes"]["names"]
        (path / lost).write_text(json.dumps(attributes))
    else:
        shutil.rmtree(path / lost)
    with pytest.raises(InputError, match=r"load\(path\)"):
        fp.load(path)


def test_the_events_are_not_there_when_only_draws_were_kept():
    for ask in (lambda: drawn_run().skeleton, lambda: drawn_run().expectation(lambda x: x)):
        with pytest.raises(InputError, match="keep='skeleton'"):
            ask()
