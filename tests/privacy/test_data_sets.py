"""Two studies of one site whose records differ in few: a coordinator subtracts, and the site's register prevents it."""

import hashlib
import multiprocessing
import os
import socket
import sqlite3
import stat
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from tests.federation.studies import SITE_SEED
from tests.study.contracts import CONTRACT, DIGEST, POLICY, rows, with_model_file
from typer.testing import CliRunner

from fedpdmc.cli import app
from fedpdmc.errors import InputError, LedgerError, Refused
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent import start
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.privacy.budget import default_path
from fedpdmc.privacy.data_sets import NAME, PERSON, DataSets, Use, is_similar
from fedpdmc.privacy.ledger import create_ledger
from fedpdmc.study import parse_study, read_policy
from fedpdmc.study.read_data import identifying_texts

RUN = b"r" * 16
FIRST = CONTRACT.replace('"two hospitals"', '"first"').replace("mean = 0.1\nscale = 1.5", "mean = 0.0\nscale = 2.5")
# The same question again, under another name of study and site.
SECOND = FIRST.replace('"first"', '"second"').replace('"north"', '"n2"')
SMOKER = 'smoker = { type = "level", levels = ["no", "yes"] }\n\n[prior]'
DROP = (
    SECOND.replace("sites =", 'missing = "drop"\nsites =').replace("+ age", "+ age + smoker").replace("[prior]", SMOKER)
)
WEIGHTED = SECOND.replace("[model]", '[model]\nweights = "smoker"').replace(
    "[prior]", 'smoker = { type = "count", bounds = [0, 2] }\n\n[prior]'
)
LABEL = """
[privacy]
epsilon = 4.0
delta = 1e-6
neighbours = "label"
"""
CAREFUL = POLICY.replace("largest_share = 1.0\nleast_cell = 1\n", "").replace("least_records = 2", "least_records = 20")
CAREFUL = CAREFUL.replace('["logistic"]', '["logistic", "poisson"]')
PEOPLE = [(*row, "no", f"P{place:04}") for place, row in enumerate(rows("north", 150))]


def table(path, people):
    """A file of people, of whom all or none have a second weight."""
    head = "ill,drug,age,smoker,person" + ",second" * (len(people[0]) == 6)
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in people)]) + "\n")
    return path


@pytest.fixture
def site(tmp_path):
    """Opens the agent of a site for a contract, its people and the additions to its policy."""
    opened = []

    def open_site(contract, people, policy="", file="", **options):
        if file:
            contract = with_model_file(contract).replace(DIGEST, hashlib.sha256(file.encode()).hexdigest())
        place, study = tmp_path / str(len(opened)), parse_study(contract.encode(), lambda name: file.encode())
        place.mkdir()
        (place / "policy.toml").write_text(CAREFUL + policy)
        opened.append(None)
        agent = open_agent(
            study, study.sites[0], table(place / "records.csv", people), store=place / "store",
            policy=read_policy(place / "policy.toml"), **{"seed": SITE_SEED, **options},
        )  # fmt: skip
        opened[-1] = agent
        agent.join(messages.encode(messages.Welcome(RUN, study.digest)))
        return agent

    yield open_site
    for agent in filter(None, opened):
        agent.log.close()


def exact_gradient(agent, dim=3, points=9):
    """At zero, up to a part of what one record adds: next to the last point the grid is fine, and each has its dither."""
    found = []
    for k in range(points):
        asked = messages.Derive(RUN, agent.log.answers + 1, np.full(dim, 1e-6 * k))
        found.append(messages.decode(agent.answer(messages.encode(asked))).gradient)
    return np.mean(found[1:], 0)


def fine_gradient(agent, dim=3):
    """The mean of releases at six places next to each other, which have all digits and dithers of their own."""
    told = []
    for k in range(7):
        asked = messages.Derive(RUN, agent.log.answers + 1, np.full(dim, 1e-7 * k))
        told.append(messages.decode(agent.answer(messages.encode(asked))).gradient)
    return np.mean(told[1:], 0)


def subtract(one, other):
    """The record by which two sites differ: at zero its gradient is (½ − y)(1, drug, age)."""
    before, after = fine_gradient(one), fine_gradient(other)
    found = after - before
    ill = found[0] < 0
    row = found / (0.5 - ill)
    return ("no", "yes")[int(ill)], ("placebo", "verum")[round(row[1])], round(10 * row[2] + 50)


def test_by_subtraction_a_coordinator_reads_one_more_patient_from_a_second_study(site):
    """The attack, where a site's own policy switches the comparison off."""
    added = ("yes", "verum", 83)
    first = site(FIRST, PEOPLE)
    second = site(SECOND, [*PEOPLE, (*added, "no", "P9999")], "least_difference = 1")
    *known, age = subtract(first, second)
    assert tuple(known) == added[:2] and abs(age - added[2]) <= 2


def test_one_more_patient_is_refused_before_anything_is_released(site, tmp_path):
    exact_gradient(site(FIRST, PEOPLE))
    with pytest.raises(Refused, match="SIMILAR_RECORDS") as error:
        site(SECOND, [*PEOPLE, ("yes", "verum", 83, "no", "P9999")])
    assert "unchanged" in str(error.value) and "least_difference" in str(error.value)
    # It says neither which records differ nor how many, and there is nothing that a coordinator could ask.
    assert not any(word in str(error.value) for word in ("83", "verum", "1 record", "151"))
    assert not (tmp_path / "1" / "store" / "audit.log").exists()


def test_the_command_of_a_site_refuses_before_it_dials(site, tmp_path):
    """As a process would: the exit status says that an operator must act, and nothing was connected to."""
    exact_gradient(site(FIRST, PEOPLE))
    (tmp_path / "study.toml").write_text(SECOND)
    (tmp_path / "policy.toml").write_text(CAREFUL)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = ["site", tmp_path / "study.toml", "--name", "n2", "--data", table(tmp_path / "n2.csv", PEOPLE[1:])]
        words += ["--policy", tmp_path / "policy.toml", "--coordinator", f"127.0.0.1:{listening.getsockname()[1]}"]
        words += ["--plain-on-loopback", "--store", tmp_path / "store", "--log-file", tmp_path / "log"]
        assert CliRunner().invoke(app, list(map(str, words))).exit_code == 2
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert "SIMILAR_RECORDS" in (tmp_path / "log").read_text()


def test_a_column_that_drops_few_is_refused(site):
    """With missing = "drop" one more column leaves out one patient, who is then known by subtraction."""
    one = [(*row[:3], "" if place == 7 else row[3], row[4]) for place, row in enumerate(PEOPLE)]
    many = [(*row[:3], "" if place % 5 == 0 else row[3], row[4]) for place, row in enumerate(PEOPLE)]
    first = site(FIRST, one)
    gradient = fine_gradient(first)
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(DROP, one)
    left = site(DROP, one, "least_difference = 0")
    missing = gradient - fine_gradient(left, 4)[:3]
    assert abs(10 * missing[2] / missing[0] + 50 - PEOPLE[7][2]) < 2
    # Thirty records are not known by subtraction.
    site(DROP, many, 'dataset = "other"')


@pytest.mark.parametrize("policy", ["", 'record_id = ["person"]'])
def test_the_same_records_are_used_again(site, policy):
    """In another order, in another study, with another column, after a restart."""
    exact_gradient(site(FIRST, PEOPLE, policy))
    shuffled = [PEOPLE[i] for i in np.random.default_rng(0).permutation(len(PEOPLE))]
    for contract, people in ((FIRST, PEOPLE), (SECOND, shuffled), (DROP, PEOPLE)):
        agent = site(contract, people, policy)
        exact_gradient(agent, len(agent.study.names))
    uses = DataSets(default_path().parent).uses()
    assert [use.study for use in uses] == ["first", "second", "second"]
    assert uses[0].digest == uses[1].digest != uses[2].digest
    assert {use.count for use in uses} == {150} and all(use.exact and use.bits > 0 for use in uses)


@pytest.mark.parametrize("policy", ["", 'record_id = ["person"]'])
def test_an_edited_record_is_one_that_differs(site, policy):
    exact_gradient(site(FIRST, PEOPLE, policy))
    edited = [("no" if PEOPLE[3][0] == "yes" else "yes", *PEOPLE[3][1:]), *PEOPLE[:3], *PEOPLE[4:]]
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(SECOND, edited, policy)


def test_other_declarations_of_a_column_do_not_hide_that_records_are_the_same(site):
    """A hostile author centres a column elsewhere, so that all values in the units of the model differ."""
    exact_gradient(site(FIRST, PEOPLE))
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(SECOND.replace("center = 50, scale = 10", "center = 50.1, scale = 9.3"), PEOPLE[1:])
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(SECOND, [(*row[:2], f"{row[2]}.0", *row[3:]) for row in PEOPLE[1:]])


def test_the_same_records_from_another_kind_of_source_are_the_same(tmp_path):
    """Text, numbers and truth values of three kinds of files; long identifiers are not rounded."""
    texts = {"age": ["67", "067.0", "41.5"], "ill": ["true", "True", "FALSE"], "id": ["9007199254740993", "0017", "x"]}
    typed = {"age": [67.0, 67.0, 41.5], "ill": [True, True, False], "id": ["9007199254740993", "17", "x"]}
    found = [{k: identifying_texts(pl.Series(v)) for k, v in each.items()} for each in (texts, typed)]
    assert found[0] == found[1]
    assert found[0]["id"][0] != identifying_texts(pl.Series([9007199254740992]))[0]
    assert identifying_texts(pl.Series(["m", "M", None])) == ["m", "M", ""]


def test_other_people_take_part_if_the_site_says_who_they_are(site):
    """Only a column of persons tells other people with nearly the same values from the same people."""
    exact_gradient(site(FIRST, PEOPLE, 'record_id = ["person"]'))
    others = [(*row[:4], f"Q{place:04}") for place, row in enumerate(PEOPLE[1:])]
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(SECOND, others)
    site(SECOND, others, 'record_id = ["person"]')
    site(SECOND, others, 'dataset = "others"')
    with pytest.raises(InputError, match="record_id: found a record without a value"):
        site(SECOND, [(*PEOPLE[0][:4], ""), *others], 'record_id = ["person"]')
    with pytest.raises(InputError, match="no column 'patient'"):
        site(SECOND, others, 'record_id = ["patient"]')


@pytest.mark.parametrize(
    "order", [("", 'record_id = ["person"]'), ('record_id = ["person"]', "")], ids=["later", "earlier"]
)
def test_persons_with_several_records_that_are_named_later_are_compared_by_values(site, order):
    """As before, all persons with two visits were new, and one patient more was not seen."""
    visits = [(*row[:2], row[2] + visit / 10, *row[3:]) for row in PEOPLE for visit in range(2)]
    exact_gradient(site(FIRST, visits, order[0]))
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(SECOND, visits[2:], order[1])
    site(SECOND, visits, order[1])


def test_values_that_were_all_recoded_do_not_hide_persons(site):
    exact_gradient(site(FIRST, PEOPLE, 'record_id = ["person"]'))
    months = [(*row[:2], row[2] + 0.5, *row[3:]) for row in PEOPLE[2:]]
    site(SECOND, months)
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(SECOND, months, 'record_id = ["person"]')


def test_noise_takes_part_and_does_not_count_as_exact(site, tmp_path):
    private = FIRST.replace('derivatives = "own"\npasses = true', 'derivatives = "none"').replace(
        "[dynamics]", '[dynamics]\nkind = "ZigZag"\nreference = "none"\ncontrol = "none"'
    )
    create_ledger(tmp_path / "ledger" / "ledger.db")
    terms = {"seed": None, "ledger": tmp_path / "ledger" / "ledger.db"}
    agent = site(private + LABEL.replace("label", "replace"), PEOPLE, **terms)
    agent.use()
    site(FIRST, PEOPLE[1:], ledger=terms["ledger"]).use()
    agent = site(private.replace('"first"', '"third"') + LABEL.replace("label", "replace"), PEOPLE[2:], **terms)
    agent.use()
    assert [use.exact for use in DataSets(tmp_path / "ledger").uses()] == [False, True, False]


def test_what_was_not_answered_was_not_used(site):
    """A site that was started with a wrong file, and corrected before any answer, is not locked out."""
    site(FIRST, PEOPLE[1:])
    exact_gradient(site(FIRST, PEOPLE))
    assert len(DataSets(default_path().parent).uses()) == 1


def test_two_studies_that_started_together_are_compared_before_the_first_answer(site):
    first, second = site(FIRST, PEOPLE), site(SECOND, PEOPLE[1:])
    exact_gradient(first)
    asked = messages.encode(messages.Derive(RUN, 1, np.zeros(3)))
    assert messages.decode(second.answer(asked)).code == "SIMILAR_RECORDS"
    assert second.log.answers == 0


def sets(register, **people):
    return {
        name: register.hash_records({"age": [str(i % 90) for i in own], PERSON: [f"P{i}" for i in own]})
        for name, own in people.items()
    }


def test_a_sum_of_earlier_sets_is_found(tmp_path):
    """All = women + men + one: no two of the sets are similar."""
    found = sets(DataSets(tmp_path), women=range(100), men=range(100, 260), all=range(261), more=range(300))
    assert not is_similar(found["men"], [found["women"]], 20)
    assert not is_similar(found["all"], [found["women"]], 20) and not is_similar(found["all"], [found["men"]], 20)
    assert is_similar(found["all"], [found["women"], found["men"]], 20)
    assert not is_similar(found["more"], [found["women"], found["men"]], 20)
    union = sets(DataSets(tmp_path), all=range(260))["all"]
    assert not is_similar(union, [found["women"], found["men"]], 20)


def test_persons_are_counted_not_rows(tmp_path):
    """One person with thirty visits is one."""
    register = DataSets(tmp_path)
    visits = [f"P{i}" for i in range(100)] + ["P200"] * 30
    found = register.hash_records({"age": ["50"] * 130, PERSON: visits})
    fewer = register.hash_records({"age": ["50"] * 100, PERSON: visits[:100]})
    assert is_similar(fewer, [found], 20)
    rows_only = [register.hash_records({"age": ["50"] * n}) for n in (130, 100)]
    assert not is_similar(rows_only[1], rows_only[:1], 20)


def test_the_register_says_nothing_to_who_steals_it_without_its_secret(tmp_path):
    """Hashes of the same records at two sites have nothing in common, and no value is in the file."""
    one, other = (DataSets(tmp_path / name) for name in ("one", "other"))
    people = {"age": ["unusual 67.3"] * 3 + ["41"], PERSON: ["Ann", "Bob", "Cyd", "Dee"]}
    found = [register.hash_records(people) for register in (one, other)]
    assert not set(found[0].hashes.ravel()) & set(found[1].hashes.ravel())
    one.use(found[0], Use("s", "c", "north", "", exact=True), 2)
    content = (tmp_path / "one" / NAME).read_bytes()
    assert b"unusual" not in content and b"Ann" not in content
    assert stat.S_IMODE(os.stat(one.path).st_mode) == 0o600


def _use_slowly(folder, place, ready):
    register = DataSets(folder)
    people = [str(i) for i in range(200) if i != place]
    found = register.hash_records({PERSON: people})
    ready.wait()
    try:
        register.use(found, Use(f"s{place}", "c", "north", "", exact=True), 20)
    except Refused:
        raise SystemExit(3) from None


def test_of_processes_that_race_one_wins(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(4)
    running = [context.Process(target=_use_slowly, args=(tmp_path, place, ready)) for place in range(4)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert sorted(process.exitcode for process in running) == [0, 3, 3, 3]
    assert len(DataSets(tmp_path).uses()) == 1


def _die_in_transaction(folder):
    register = DataSets(folder)
    found = register.hash_records({PERSON: ["a", "b"]})
    with register._transaction() as db:
        db.execute("INSERT INTO sets VALUES (?, 2, '[]', x'00')", (found.digest,))
        os._exit(9)


def test_a_crash_leaves_all_or_nothing(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_die_in_transaction, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    register = DataSets(tmp_path)
    found = register.hash_records({PERSON: ["a", "b"]})
    register.use(found, Use("s", "c", "north", "", exact=True), 20)
    assert [use.count for use in register.uses()] == [2] and time.time() - register.uses()[0].time < 60


def test_a_damaged_register_and_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / NAME).write_bytes(b"not a database, but long enough to be taken for one" * 40)
    with pytest.raises(LedgerError, match="damaged"):
        DataSets(tmp_path).uses()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match="not writable.*FEDPDMC_LEDGER"):
        DataSets(tmp_path / "other").uses()


def test_the_command_shows_the_register(site):
    runner = CliRunner()
    assert runner.invoke(app, ["ledger", "data-sets"]).exit_code == 2
    exact_gradient(site(FIRST, PEOPLE, 'dataset = "cohort"\nrecord_id = ["person"]'))
    shown = runner.invoke(app, ["ledger", "data-sets"])
    assert shown.exit_code == 0 and "cohort" in shown.output and "first" in shown.output and " 150 " in shown.output
    assert "age, drug, ill, (person)" in shown.output
    db = sqlite3.connect(DataSets(default_path().parent).path)
    assert db.execute("SELECT count(*) FROM sets").fetchone() == (1,)


def test_a_register_that_was_replaced_during_a_run_takes_no_charges(site):
    """Bits would be lost, and with them the limit."""
    agent = site(FIRST, PEOPLE)
    exact_gradient(agent)
    default_path().with_name(NAME).unlink()
    with pytest.raises(LedgerError, match="this study is not in it"):
        agent.computation.information.add_release(1.0)


@pytest.mark.parametrize("compared", [True, False], ids=["compared", "as before"])
@pytest.mark.parametrize("policy", ["", 'record_id = ["person"]'])
def test_weights_that_leave_out_few_are_refused(site, policy, compared):
    """All patients, and those per protocol: a column of weights leaves out one, who is then known by subtraction."""
    people = [(*row[:3], int(place != 7), row[4]) for place, row in enumerate(PEOPLE)]
    first = site(FIRST, people, policy)
    gradient = fine_gradient(first)
    if compared:
        with pytest.raises(Refused, match="SIMILAR_RECORDS"):
            site(WEIGHTED, people, policy)
        # Weights that many records have are those of another question.
        half = [(*row[:3], 1 + place % 2, row[4]) for place, row in enumerate(PEOPLE)]
        site(WEIGHTED, half, policy)
    else:
        left = site(WEIGHTED, people, policy + "\nleast_difference = 1")
        missing = gradient - fine_gradient(left)
        assert abs(10 * missing[2] / missing[0] + 50 - PEOPLE[7][2]) < 2


def weighted(column, least=0):
    """A contract with this column of weights."""
    declared = f'{column} = {{ type = "number", bounds = [{least}, 9] }}\n\n[prior]'
    text = FIRST.replace('"first"', f'"by {column}"').replace("[model]", f'[model]\nweights = "{column}"')
    return text.replace("[prior]", declared)


# Two weights of each of 150 patients: how much of a few of them is taken changes, and so does what is usual.
OTHER_WEIGHTS = {
    "left out": (lambda k: 1 + (k >= 76), lambda k: 0 if k < 3 else 1 + (k >= 76)),
    "more of them": (lambda k: 1 + (k >= 76), lambda k: 3 if k < 3 else 1 + (k >= 76)),
    "another unit": (lambda k: 1 + (k >= 76), lambda k: 7 if k < 3 else 2 + 2 * (k >= 76)),
    "all differ": (lambda k: 1 + k / 100, lambda k: (0 if k < 3 else 3) * (1 + k / 100)),
    "all differ, more of them": (lambda k: 1 + k / 100, lambda k: (0.1 if k < 3 else 3) * (1 + k / 100)),
}


@pytest.mark.parametrize("policy", ["", 'record_id = ["person"]'])
@pytest.mark.parametrize("change", OTHER_WEIGHTS)
def test_weights_whose_usual_value_changes_do_not_hide_that_few_differ(site, change, policy):
    """As before, parts were compared with the usual one of each study: if that changed, so had everybody's."""
    first, second = OTHER_WEIGHTS[change]
    people = [(*row[:3], first(k), row[4], second(k)) for k, row in enumerate(PEOPLE)]
    exact_gradient(site(weighted("smoker"), people, policy))
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(weighted("second"), people, policy)
    # The same parts of the same records, in another unit and up to rounding, and those of another question.
    same = [(*row[:5], row[3] * 1.7 + 1e-13 * k) for k, row in enumerate(people)]
    site(weighted("second"), same, policy)
    site(weighted("second"), [(*row[:5], 1 + k % 3) for k, row in enumerate(people)], policy)


def test_records_with_the_same_values_and_other_parts_are_told_apart(tmp_path):
    """Of a hundred with the same values, each with a part of its own, the one with the least is left out."""
    register, parts = DataSets(tmp_path), np.log(1 + np.arange(100.0))
    found = register.hash_records({"ill": ["yes"] * 100}, {"\0log weight": parts - parts[0]})
    for left, similar in ((parts[1:], True), (parts[::2], False), (parts, False), (parts[::-1] + 1, False)):
        other = register.hash_records({"ill": ["yes"] * len(left)}, {"\0log weight": left - left[0]})
        assert is_similar(other, [found], 20) is similar
    # Equal in size, of other sign.
    signs = [register.hash_records({"ill": ["yes"] * 100}, {"\0offset": np.repeat([0.0, x], [95, 5])}) for x in (2, -2)]
    assert is_similar(signs[0], signs[1:], 20)


def test_records_of_weight_zero_are_in_no_number_of_records(site):
    """Eighteen of 150 have a weight: a study of eighteen records, which the policy does not allow."""
    people = [(*row[:3], int(k % 8 == 0 and k < 144), row[4]) for k, row in enumerate(PEOPLE)]
    with pytest.raises(Refused, match="POLICY_RECORDS"):
        site(weighted("smoker"), people)
    # Nor in a small cell: of the only level with three records two have a weight of zero.
    few = [("verum" if k < 3 else "placebo", int(k not in (0, 1))) for k in range(150)]
    people = [(row[0], few[k][0], row[2], few[k][1], row[4]) for k, row in enumerate(PEOPLE)]
    with pytest.raises(InputError, match="only 1 records"):
        site(weighted("smoker"), people)


COUNTS = FIRST.replace('"logistic"', '"poisson"').replace(
    '"level", levels = ["no", "yes"]', '"count", bounds = [0, 9]', 1
)
# The same question again, with another part of everybody.
PARTS = {
    "offset": COUNTS.replace('"first"', '"second"').replace("drug + age", "drug + age + offset(I(age / 1000000000))"),
    "weights": COUNTS.replace("[model]", '[model]\nweights = "smoker"').replace(
        "[prior]", 'smoker = { type = "number", bounds = [0, 2] }\n\n[prior]'
    ),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_all_differ_do_not_hide_that_records_are_the_same(site, part):
    """As before, who had another weight or offset was somebody else: so was everybody, and one more was not seen."""
    people = [(int(row[0] == "yes"), *row[1:3], 1 + place * 1e-9, row[4]) for place, row in enumerate(PEOPLE)]
    more = [*people, (9, "verum", 83, 1.0, "P9999")]
    gradient = fine_gradient(site(COUNTS, people))
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(PARTS[part], more)
    # The same records take part with any of them.
    site(PARTS[part], people)
    # The attack, where the comparison is switched off.
    change = fine_gradient(site(PARTS[part], more, "least_difference = 1")) - gradient
    assert abs(1 - change[0] - 9) < 0.5 and abs(10 * change[2] / change[0] + 50 - 83) <= 2


# It takes out who is 83, and is a little different for everybody.
AGED = "offset(I(age / 1000000 - 30 / (1 + 1000000 * (age - 83) ** 2)))"


def test_an_offset_that_takes_out_few_is_refused(site):
    """As before, all had another offset than usual, and nobody was taken for the same."""
    people = [(int(row[0] == "yes"), row[1], min(row[2], 82), *row[3:]) for row in PEOPLE]
    more = [*people, (9, "verum", 83, "no", "P9999")]
    gradient = fine_gradient(site(COUNTS, more))
    second = COUNTS.replace('"first"', '"second"').replace("drug + age", f"drug + age + {AGED}")
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(second, more)
    change = gradient - fine_gradient(site(second, more, "least_difference = 1"))
    assert abs(change[0] - 1) < 0.2 and abs(10 * change[2] / change[0] + 50 - 83) <= 2


TRIALS = (
    FIRST.replace('"first"', '"second"')
    .replace("[model]", '[model]\ntrials = "smoker"')
    .replace('ill = { type = "level", levels = ["no", "yes"] }', 'ill = { type = "count", bounds = [0, 2] }')
    .replace("[prior]", 'smoker = { type = "count", bounds = [0, 2] }\n\n[prior]')
)


def test_trials_that_leave_out_few_are_refused(site):
    """No trials and no events: that patient adds nothing, as with a weight of 0."""
    one = next(place for place, row in enumerate(PEOPLE) if row[0] == "no")
    people = [(int(row[0] == "yes"), *row[1:3], int(place != one), row[4]) for place, row in enumerate(PEOPLE)]
    first = site(FIRST.replace('["no", "yes"]', '["0", "1"]'), people)
    gradient = fine_gradient(first)
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(TRIALS, people)
    missing = gradient - fine_gradient(site(TRIALS, people, "least_difference = 1"))
    assert abs(10 * missing[2] / missing[0] + 50 - PEOPLE[one][2]) < 2


# Logistic regression, of which a column takes a part of each record.
PARTLY = """fedpdmc model 1
title Binary regression of parts of records
predictor eta f64[]
column y f64[] binary
column smoker f64[] real
minus_log_likelihood
%1 = logaddexp eta 0.0 : f64[]
%2 = mul y eta : f64[]
%3 = sub %1 %2 : f64[]
%4 = mul smoker %3 : f64[]
return %4
end
"""
# The same with the part that everybody has but those of an age: 1 − exp(−10⁶ (age − 1.5)²).
BUT_AN_AGE = (
    PARTLY.replace("column smoker", "column age")[: PARTLY.index("%1") - 3]
    + """%1 = sub age 1.5 : f64[]
%2 = square %1 : f64[]
%3 = mul %2 -1000000.0 : f64[]
%4 = expm1 %3 : f64[]
%5 = logaddexp eta 0.0 : f64[]
%6 = mul y eta : f64[]
%7 = sub %5 %6 : f64[]
%8 = mul %7 %4 : f64[]
%9 = neg %8 : f64[]
return %9
end
"""
)
OF_PARTS = WEIGHTED.replace('weights = "smoker"\n', "").replace('"count", bounds = [0, 2]', '"number", bounds = [0, 2]')


@pytest.mark.parametrize("policy", ["", 'record_id = ["person"]'])
@pytest.mark.parametrize("part", [0, 1e-9])
def test_a_model_file_that_takes_out_few_by_a_column_is_refused(site, monkeypatch, part, policy):
    """As before, the values of all records were the same; the file is one that the policy allows."""
    if part or policy:
        # It is tried once.
        monkeypatch.setattr(start, "try_model_file", lambda *given: None)
    people = [(*row[:3], part if k == 7 else 1, row[4]) for k, row in enumerate(PEOPLE)]
    gradient = fine_gradient(site(FIRST, people, policy))
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(OF_PARTS, people, policy, PARTLY)
    missing = gradient - fine_gradient(site(OF_PARTS, people, policy + "\nleast_difference = 1", PARTLY))
    assert abs(10 * missing[2] / missing[0] + 50 - PEOPLE[7][2]) < 2
    # The same file of all, again, and of many fewer.
    everybody, policy = [(*row[:3], 1, row[4]) for row in PEOPLE], policy + '\ndataset = "other"'
    exact_gradient(site(FIRST, everybody, policy))
    exact_gradient(site(OF_PARTS, everybody, policy, PARTLY), points=2)
    site(OF_PARTS.replace('"second"', '"third"'), everybody, policy, PARTLY)
    site(OF_PARTS, [(*row[:3], k % 2, row[4]) for k, row in enumerate(PEOPLE)], policy, PARTLY)


def test_a_model_file_that_takes_half_of_one_record_is_not_found(site, monkeypatch):
    """What remains (docs/study-security.md): she is in both studies, and their difference is half of her record."""
    monkeypatch.setattr(start, "try_model_file", lambda *given: None)
    people = [(*row[:3], 0.5 if k == 7 else 1, row[4]) for k, row in enumerate(PEOPLE)]
    missing = fine_gradient(site(FIRST, people)) - fine_gradient(site(OF_PARTS, people, "", PARTLY))
    assert abs(10 * missing[2] / missing[0] + 50 - PEOPLE[7][2]) < 4


def test_a_model_file_that_takes_out_an_age_is_refused(site):
    """A part that is a function of a column: three of 150 are 65."""
    people = [(*row[:2], 65 if k < 3 else row[2] + (row[2] == 65), *row[3:]) for k, row in enumerate(PEOPLE)]
    exact_gradient(site(FIRST, people))
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(SECOND.replace("drug + age", "drug"), people, "", BUT_AN_AGE)
    site(SECOND.replace("drug + age", "drug"), people, "least_difference = 1", BUT_AN_AGE)


@pytest.mark.parametrize("rest", [0, 1e-9])
def test_a_model_file_to_which_few_records_add_is_refused(site, monkeypatch, rest):
    """Whether or not there was a study before."""
    monkeypatch.setattr(start, "try_model_file", lambda *given: None)
    people = [(*row[:3], 1 if k in (3, 50, 90) else rest, row[4]) for k, row in enumerate(PEOPLE)]
    with pytest.raises(Refused, match="POLICY_RECORDS"):
        site(OF_PARTS, people, "", PARTLY)


def test_a_formula_that_takes_out_few_is_refused(site):
    """No intercept, and a column of ones in its place that is 0 for three."""
    people = [(*row[:3], int(k >= 3), row[4]) for k, row in enumerate(PEOPLE)]
    flagged = OF_PARTS.replace("ill ~ drug + age", "ill ~ 0 + smoker + smoker:drug + smoker:age")
    gradient = fine_gradient(site(FIRST, people))
    with pytest.raises(Refused, match="SIMILAR_RECORDS"):
        site(flagged, people)
    agent = site(flagged, people, "least_difference = 1")
    missing = gradient[0] - fine_gradient(agent, len(agent.study.names))[0]
    assert abs(missing - sum(0.5 - (row[0] == "yes") for row in PEOPLE[:3])) < 0.2
