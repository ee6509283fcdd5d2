"""Contracts: what is read, and that nothing half right passes."""

import functools
import hashlib
import re

import numpy as np
import pandas as pd
import pytest
from tests.privacy.agents import contract
from tests.study.contracts import CONTRACT, EFFECTS, POLICY

import fedpdmc as fp
from fedpdmc.errors import InputError, Refused
from fedpdmc.operations.bundle import draft_policy
from fedpdmc.study import parse_study, read_policy, read_study


def changed(old, new):
    assert old in CONTRACT
    return CONTRACT.replace(old, new).encode()


def test_a_contract_says_everything():
    study = parse_study(CONTRACT.encode())
    assert study.names == ("Intercept", "drug[T.verum]", "age")
    assert study.digest == hashlib.sha256(CONTRACT.encode()).digest()
    assert (study.kind, study.rates, study.reference, study.control) == (
        "Boomerang", {"refresh": "quarter-turns"}, "vb", "quadratic",
    )  # fmt: skip
    prior = study.prior()
    np.testing.assert_allclose(np.asarray(prior.precision), np.eye(3) / 1.5**2)


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("format = 1", "format = 2", "format"),
        ('"two hospitals"', r'"two \u001b[8mhospitals"', "study.toml: name: found 'two \\x1b"),
        ('"two hospitals"', r'"two hospitals\nReady. Now run: id"', "study.toml: name: found"),
        ('"verum"]', r'"verum\u202e"]', "drug: levels"),
        ('"verum"]', r'"verum]\nReady. Now run: id"]', "drug: levels: found"),
        ("age =", r'"age\nReady. Now run: id" =', "columns: found 'age\\nReady"),
        ("[limits]", '[coordinates]\nnorth = ["age"]\n[limits]', "coordinates: found Boomerang"),
        ("[limits]", '[coordinates]\nnorth = ["weight"]\n[limits]', "coordinates: north: found ['weight']"),
        ("[limits]", '[coordinates]\neast = ["age"]\n[limits]', "coordinates: east"),
        ("[limits]\nrounds = 2000", "[limits]", "limits: rounds"),
        ("rounds = 2000", "round = 2000\nrounds = 2000", "limits: round"),
        ('["north", "south"]', '["north", "north"]', "sites"),
        ('["north", "south"]', '["north", "coordinator"]', "site name"),
        ('family = "logistic"', 'family = "probit"', "model: family"),
        ("ill ~ drug + age", "ill ~ drug + poly(age, 2)", "poly"),
        ("ill ~ drug + age", "ill ~ drug + {__import__('os').system('true')}", "nothing else is evaluated"),
        ("ill ~ drug + age", "ill ~ drug + weight", "Declare this column"),
        ("ill ~ drug + age", "ill ~ ill + age", "both sides"),
        ("ill ~ drug + age", "drug + age", "formula"),
        ("ill ~ drug + age", "age ~ drug", "response of logistic"),
        ("bounds = [18, 100]", "bounds = [100, 18]", "bounds"),
        ("bounds = [18, 100], ", "", "bounds"),
        ("scale = 1.5", "scale = -1.5", "prior: scale"),
        ("scale = 1.5", "scale = [1.5, 2.0]", "2 numbers"),
        ("scale = 1.5", "scale = nan", "prior: scale"),
        ("chains = 4", "chains = 0", "chains"),
        ("chains = 4", 'chains = 4\nkind = "HMC"', "dynamics: kind"),
        ("duration = 6.0", "duration = 6.0\ness = 10", "ess and duration"),
        ('derivatives = "own"', 'derivatives = "summed"', "'summed' over 2 sites"),
        ('derivatives = "own"', 'derivatives = "none"', "reference = 'vb'"),
        ("[limits]", "[privacy]\nepsilon = 1.0\n[limits]", "privacy: delta"),
        ("[limits]", "[privacy]\nepsilon = 1.0\ndelta = 1e-6\n[limits]", "Only coordinate flips can be private"),
        ('derivatives = "own"', 'derivatives = "noisy"', "privacy: release"),
        ("[limits]", "[privacy]\nepsilon = 1.0\ndelta = 1e-6\nrelease = 0.1\n[limits]", "privacy: release"),
        ("[prior]", "[prior", "study.toml"),
    ],
)
def test_what_is_wrong_is_refused_where_it_stands(old, new, where):
    with pytest.raises(InputError) as error:
        parse_study(changed(old, new))
    assert where in str(error.value)


def test_the_design_follows_from_the_contract_and_not_from_the_records():
    study = parse_study(changed("ill ~ drug + age", "ill ~ drug * age"))
    assert study.names == ("Intercept", "drug[T.verum]", "age", "drug[T.verum]:age")
    drug = pd.Categorical(["placebo", "placebo"], categories=["placebo", "verum"])
    ill = pd.Categorical(["yes", "no"], categories=["no", "yes"])
    records = pd.DataFrame({"ill": ill, "drug": drug, "age": [0.5, -1.0]})
    np.testing.assert_array_equal(study.design.matrix(records), [[1, 0, 0.5, 0], [1, 0, -1.0, 0]])
    np.testing.assert_array_equal(study.design.response(records), [1, 0])
    assert study.design.matrix(records[:0]).shape == (0, 4)


@pytest.mark.parametrize(
    ("old", "new", "records", "code"),
    [
        ("", "", 1, "POLICY_RECORDS"),
        ("= 0.5", "= 0.1", 12, "POLICY_PARAMETERS"),
        ('["logistic"]', '["linear", "poisson"]', 12, "POLICY_FAMILY"),
        ('derivatives = "own"', 'derivatives = "summed"', 12, "POLICY_DERIVATIVES"),
        ("least_cell = 1", "most_derivatives = 11", 12, "POLICY_POINTS"),
        ("passes = true", "passes = false", 12, "POLICY_PASSES"),
        ("1000000", "1999", 12, "POLICY_ROUNDS"),
        ("1e6", "999.0", 12, "POLICY_TIME"),
        ("least_records = 2", "least_records = 5\nlargest_epsilon = 1.0", 12, "POLICY_EPSILON"),
        ("least_records = 2", "least_records = 5\nmost_chains = 3", 12, "POLICY_CHAINS"),
        ("least_without_budget = 0", "", 49, "POLICY_WITHOUT_BUDGET"),
        ("least_records = 2", "least_records = 5\nleast_sites = 3", 12, "POLICY_SITES"),
    ],
)
def test_a_policy_refuses_with_a_code(tmp_path, old, new, records, code):
    (tmp_path / "policy.toml").write_text(POLICY.replace(old, new))
    study, policy = parse_study(CONTRACT.encode()), read_policy(tmp_path / "policy.toml")
    with pytest.raises(Refused) as error:
        policy.check("north", study, records)
    assert error.value.code == code


CHOSEN = {
    "effects of groups": EFFECTS,
    "a Student-t or horseshoe prior": CONTRACT.replace(
        "mean = 0.1\nscale = 1.5", "scale = 1.5\nstudent_t = { age = 4 }"
    ),
    "[coordinates]": CONTRACT.replace('derivatives = "own"\npasses = true', 'derivatives = "none"').replace(
        "[dynamics]", '[coordinates]\nnorth = ["Intercept", "age"]\n\n[dynamics]\nkind = "ZigZag"\nreference = "none"'
    ),
    'control = "linear"': CONTRACT.replace("[dynamics]", '[dynamics]\ncontrol = "linear"'),
}


@pytest.mark.parametrize("reason", CHOSEN)
def test_contracts_whose_plans_the_coordinator_chooses_need_a_key(tmp_path, reason):
    path, study = tmp_path / "policy.toml", parse_study(CHOSEN[reason].encode())
    path.write_text(draft_policy(study))
    with pytest.raises(Refused, match="POLICY_CHOICE.*" + re.escape(reason)) as refused:
        read_policy(path).check("north", study, 100)
    assert ("[privacy]" in str(refused.value)) == (study.effects is None)
    assert "coordinator_may_choose" in path.read_text()
    for key, code in (("true", None), ("false", "POLICY_CHOICE")):
        path.write_text(f"{draft_policy(study)}coordinator_may_choose = {key}\n")
        assert code_of(read_policy(path), study) == code
    path.write_text(draft_policy(plain := parse_study(CONTRACT.encode())))
    assert "coordinator_may_choose" not in path.read_text() and code_of(read_policy(path), plain) is None


def code_of(policy, study):
    """The code of a refusal, or None."""
    try:
        policy.check("north", study, 100)
    except Refused as refused:
        return refused.code
    return None


PRIVATE = (
    CONTRACT.replace("[run]\nduration = 6.0\nburn_in = 1.0", '[run]\nmethod = "private-laplace"')
    .replace('derivatives = "own"\npasses = true', 'arrivals = false\nderivatives = "noisy"')
    .replace("observed_time = 1000.0\n", "")
)
PRIVATE_POLICY = POLICY.replace('"own"', '"noisy"')


def private_code(tmp_path, policy, contract=PRIVATE, **terms):
    """The code with which a policy refuses a contract with these terms of a budget."""
    (tmp_path / "policy.toml").write_text(PRIVATE_POLICY + policy)
    table = "".join(f"{key} = {value!r}\n" for key, value in terms.items())
    study = parse_study(f"{contract}\n[privacy]\n{table}".encode())
    return code_of(read_policy(tmp_path / "policy.toml"), study)


def test_under_a_privacy_budget_a_coordinator_may_choose(tmp_path):
    assert private_code(tmp_path, "", contract := CHOSEN["[coordinates]"], epsilon=1.0, delta=1e-6) is None
    study, policy = parse_study(contract.encode()), read_policy(tmp_path / "policy.toml")
    assert code_of(policy, study) == "POLICY_CHOICE"


@pytest.mark.parametrize("arrivals", [False, True])
def test_a_contract_is_judged_by_its_whole_curve(tmp_path, arrivals):
    """A delta of 0.4 is no privacy, whatever epsilon says; a larger delta at a small epsilon may be a good one."""
    contract = PRIVATE
    if arrivals:
        contract = CONTRACT.replace('derivatives = "own"\npasses = true', 'derivatives = "none"')
        contract = contract.replace("[dynamics]", '[dynamics]\nkind = "ZigZag"\nreference = "none"\ncontrol = "none"')
    find = functools.partial(private_code, tmp_path, contract=contract)
    cap = "largest_epsilon = 1.0\n"
    assert find(cap, epsilon=1.0, delta=0.4) == "POLICY_DELTA"
    assert find("", epsilon=1.0, delta=0.4) == find("", epsilon=1.0, delta=1.1e-5) == "POLICY_DELTA"
    assert find(cap, epsilon=1.0, delta=1e-5) is None and find("", epsilon=30.0, delta=1e-5) is None
    assert find(cap, epsilon=1.1, delta=1e-9) == "POLICY_EPSILON"
    # At the largest delta that is allowed, 1e-5, this budget has an epsilon below one.
    assert find(cap, epsilon=0.1, delta=2e-5) is None and find("", epsilon=0.1, delta=2e-5) == "POLICY_DELTA"
    assert find(cap, epsilon=0.99, delta=1e-3) == "POLICY_DELTA"
    assert find("largest_delta = 1e-8\n", epsilon=1.0, delta=1e-7) == "POLICY_DELTA"
    assert find("largest_delta = 0.5\n" + cap, epsilon=1.0, delta=0.4) is None


def test_the_relation_label_needs_the_permission_of_the_policy(tmp_path):
    terms = {"epsilon": 1.0, "delta": 1e-6, "neighbours": "label"}
    assert private_code(tmp_path, "", **terms) == "POLICY_NEIGHBOURS"
    assert private_code(tmp_path, 'neighbours = ["replace", "label"]\n', **terms) is None
    assert private_code(tmp_path, "", **terms | {"neighbours": "add-remove"}) is None
    assert (
        private_code(tmp_path, 'neighbours = ["label"]\n', **terms | {"neighbours": "replace"}) == "POLICY_NEIGHBOURS"
    )
    assert private_code(tmp_path, 'neighbours = ["label"]\nmost_derivatives = 3\n', **terms) == "POLICY_POINTS"
    with pytest.raises(InputError, match="policy.toml.*neighbours.*add-remove"):
        private_code(tmp_path, 'neighbours = ["person"]\n', **terms)


@pytest.mark.parametrize(("pinned", "refused"), [((), True), (("south",), True), (("south", "west"), False)])
def test_a_policy_asks_for_named_certificates_of_other_sites(tmp_path, pinned, refused):
    """North's own, or that of a party outside the study, is none of them."""
    summed = CONTRACT.replace('"south"]', '"south", "west"]').replace('derivatives = "own"', 'derivatives = "summed"')
    named = "".join(f'{name} = "{64 * "a"}"\n' for name in ("north", "east", *pinned))
    (tmp_path / "policy.toml").write_text(f"least_pinned = 2\n{POLICY}[certificates]\n{named}")
    policy, study = read_policy(tmp_path / "policy.toml"), parse_study(summed.encode())
    if not refused:
        policy.check("north", study, 12)
        return
    with pytest.raises(Refused, match="POLICY_PINNED"):
        policy.check("north", study, 12)


@pytest.mark.parametrize("hours", ["[8]", "[8, 8]", "[-1, 8]", "[8.5, 9]", "8", '["a", "b"]', "[25, 1]"])
def test_hours_are_two_hours_of_the_day(tmp_path, hours):
    (tmp_path / "policy.toml").write_text(f"hours = {hours}\n{POLICY}")
    with pytest.raises(InputError, match="hours"):
        read_policy(tmp_path / "policy.toml")


STRANGE = {
    "power": "ill ~ (drug + age)**30",
    "many ways": "ill ~ " + "*".join(["age", "drug"] * 11),
    "levels": "ill ~ " + ":".join(["drug"] * 22),
    "long": "ill ~ " + " + ".join(["age"] * 1000),
    "open": "ill ~ (drug + age",
    "closed": "ill ~ drug) + age",
    "nothing": "ill ~",
    "operators": "ill ~ + * : age",
    "tilde": "ill ~ ~ ~ age",
    "call": "ill ~ __import__('os').system('true')",
    "braces": "ill ~ {age}",
    "open back quote": "ill ~ `age",
    "call in back quotes": "ill ~ `__import__('os').system('true')`",
    "column that nobody declared in back quotes": "ill ~ `age `",
    "huge power": "ill ~ age**" + "9" * 500,
    "variable power": "ill ~ age**drug",
    "nul": "ill ~ age\\u0000",
    "bytes": "ill ~ \\u202eage",
}


@pytest.mark.parametrize("formula", STRANGE.values(), ids=STRANGE)
def test_strange_formulas_are_refused_at_once_and_in_a_sentence(formula):
    with pytest.raises(InputError) as error:
        parse_study(changed("ill ~ drug + age", formula))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "formula", ["ill ~ (drug + age)**2", "ill ~ drug * `age`", "ill ~ drug:age - 1", "ill ~ 0 + age"]
)
def test_usual_formulas_pass(formula):
    assert parse_study(changed("ill ~ drug + age", formula)).names


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("format = 1", "format = 1\ndeep = " + "[" * 20_000),
        ("format = 1", "format = 1\ndeep = " + "{a=" * 20_000),
        ("rounds = 2000", "rounds = " + "9" * 5000),
        ("rounds = 2000", "rounds = " + "9" * 4000),
        ("observed_time = 1000.0", "observed_time = " + "9" * 400),
        ("format = 1", "\ufefformat = 1"),
    ],
)
def test_toml_that_is_too_much_is_refused_in_a_sentence(old, new):
    with pytest.raises(InputError) as error:
        parse_study(changed(old, new))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("old", "new"),
    [("age = {", '"\u0430ge" = {'), ('"north"', '"n\u043erth"'), ('"north"', '"\uff4eorth"')],
)
def test_names_that_look_like_others_are_refused(old, new):
    """A Cyrillic letter among Latin ones, and letters of another width."""
    with pytest.raises(InputError, match="one script"):
        parse_study(CONTRACT.replace(old, new).encode())


def test_a_policy_lets_pass_what_it_allows(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY + f'[certificates]\nsouth = "{"AB:" * 31}AB"\n')
    policy, study = read_policy(tmp_path / "policy.toml"), parse_study(CONTRACT.encode())
    policy.check("north", study, 12)
    assert policy.certificates == {"south": 32 * "ab"}
    with pytest.raises(Refused, match="POLICY_SITE"):
        policy.check("east", study, 12)
    (tmp_path / "policy.toml").write_text(POLICY + "[certificates]\nsouth = 'abc'\n")
    with pytest.raises(InputError, match="64 hexadecimal digits"):
        read_policy(tmp_path / "policy.toml")


def test_a_budget_covers_no_passes():
    contract = CONTRACT.replace("[dynamics]", '[dynamics]\nkind = "ZigZag"').replace('"own"', '"none"')
    with pytest.raises(InputError, match="No budget covers them"):
        parse_study((contract + "[privacy]\nepsilon = 1.0\ndelta = 1e-6\n").encode())


LINEAR = CONTRACT.replace('"logistic"', '"linear"').replace("ill ~ drug + age", "bmi ~ drug + age")
LINEAR = LINEAR.replace("[prior]", 'bmi = { type = "number", bounds = [10, 60] }\n\n[prior]')


def test_an_unknown_scale_is_one_more_parameter():
    study = parse_study(LINEAR.encode())
    assert study.names == ("Intercept", "drug[T.verum]", "age", "log_sigma") and study.prior().dim == 4
    np.testing.assert_allclose(study.guess, [35.0, 0.0, 0.0, np.log(50 / 8)])
    known = parse_study(LINEAR.replace('"linear"', '"linear"\nscale = 4.0').encode())
    assert known.names == study.names[:3] and known.guess is None
    with pytest.raises(InputError, match="student_t|model: scale"):
        parse_study(LINEAR.replace('"linear"', '"student_t"\ndf = 4.0').encode())


def test_a_linear_regression_with_an_unknown_scale_runs_as_a_study(tmp_path):
    rng, files = np.random.default_rng(0), {}
    drug, age = rng.integers(0, 2, 60), rng.integers(20, 90, 60)
    bmi = 24 - 1.5 * drug + 0.1 * (age - 50) + 3.0 * rng.normal(size=60)
    for name, rows in (("north", slice(0, 45)), ("south", slice(45, 60))):
        table = zip(bmi[rows], drug[rows], age[rows], strict=True)
        lines = [f"{b},{('placebo', 'verum')[d]},{a}" for b, d, a in table]
        files[name] = tmp_path / f"{name}.csv"
        files[name].write_text("\n".join(["bmi,drug,age", *lines]))
    text = LINEAR.replace("mean = 0.1\nscale = 1.5", "flat = true").replace("chains = 4", "chains = 16")
    text = text.replace("observed_time = 1000.0", "observed_time = 1e5")
    study = parse_study(text.replace("duration = 6.0", "duration = 30.0").encode())
    with fp.connect(study, data=files, seed=1) as connection:
        post = fp.sample(connection, progress=False)
    X = np.column_stack([np.ones(60), drug, (age - 50) / 10])
    fit, rest = np.linalg.lstsq(X, bmi, rcond=None)[:2]
    assert post.names == list(study.names) and post.certified
    assert np.all(np.abs(post.mean()[:3] - fit) < 0.4 * np.sqrt(np.diag(post.cov())[:3]))
    assert abs(post.mean()[3] - 0.5 * np.log(rest[0] / 57)) < 0.05


def test_messages_name_the_file_as_it_is_called(tmp_path):
    path = tmp_path / "trial.toml"
    path.write_bytes(changed("format = 1", "format = 2"))
    with pytest.raises(InputError) as error:
        read_study(path)
    assert str(error.value).startswith(f"{path}: format: found 2.")
    path.write_text(POLICY.replace("least_records = 2", ""))
    with pytest.raises(InputError) as error:
        read_policy(path)
    assert str(error.value).startswith(f"{path}: least_records")


def test_one_limit_of_records_serves_the_budget_too():
    study = contract()
    assert study.most_records == study.budget().bounds.most_records == 10_000


# A comment in which the key is hidden, reordered or taken back, and what people would read as the same word.
UNSEEN = {
    "U+202E (RIGHT-TO-LEFT OVERRIDE)": "\u202e", "U+2066 (LEFT-TO-RIGHT ISOLATE)": "\u2066",
    "U+200B (ZERO WIDTH SPACE)": "\u200b", "U+FEFF (ZERO WIDTH NO-BREAK SPACE)": "\ufeff",
    "U+00AD (SOFT HYPHEN)": "\u00ad", "U+034F (COMBINING GRAPHEME JOINER)": "\u034f",
    "U+115F (HANGUL CHOSEONG FILLER)": "\u115f", "U+FE0F (VARIATION SELECTOR-16)": "\ufe0f",
    "U+2800 (BRAILLE PATTERN BLANK)": "\u2800", "U+2028 (LINE SEPARATOR)": "\u2028",
    "U+E0041 (TAG LATIN CAPITAL LETTER A)": "\U000e0041", "U+0085 (control)": "\u0085",
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_person_does_not_see_is_refused_with_its_line(tmp_path, name):
    """In comments too: contracts and policies are read and compared on terminals."""
    letter = UNSEEN[name]
    for text, line in (
        (
            CONTRACT.replace("[prior]", f"# agreed {letter} by all\n[prior]"),
            CONTRACT.split("[prior]")[0].count("\n") + 1,
        ),
        (CONTRACT.replace('"two hospitals"', f'"two {letter}hospitals"'), 3),
    ):
        with pytest.raises(InputError, match=re.escape(f"study.toml: found the character {name} in line {line}.")):
            parse_study(text.encode())
    (tmp_path / "policy.toml").write_text(f"{POLICY}\n# least_records = 20 {letter}\n", encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(f"policy.toml: found the character {name} in line")):
        read_policy(tmp_path / "policy.toml")
    # Nor as an escape, in a name, a level or a text; what is shown of it is plain.
    escaped = f"\\U{ord(letter):08x}"
    for old, new in (
        ("two hospitals", f"two{escaped}"),
        ('"no", "yes"', f'"no", "yes", "yes{escaped}"'),
        ("north", f"north{escaped}"),
    ):
        with pytest.raises(InputError) as error:
            parse_study(CONTRACT.replace(old, new).encode())
        assert letter not in str(error.value)


def test_words_of_any_language_are_read():
    """Letters with accents, of other scripts, spaces of other widths, and the ends of lines of Windows."""
    text = CONTRACT.replace("[prior]", "# Précision\u00a0: âge en années, возраст, 年齢\u3000です, גיל\t(±)\n[prior]")
    assert parse_study(text.encode()).names == parse_study(text.replace("\n", "\r\n").encode()).names
