"""Authors of model files who ask about one person, or for endless work: refused by public facts, whoever is at the site."""

import hashlib
import time

import numpy as np
import pytest
from tests.federation.test_derivative_disclosure import CAREFUL, OWN, RUN, Guarded, code, derive
from tests.federation.test_record_contributions import SNOOP
from tests.study.contracts import DIGEST, MODEL_FILE, with_model_file

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import Discontinuous, InputError
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent import model_trial, start
from fedpdmc.federation.site_agent.derivative_disclosure import ModelDisclosure
from fedpdmc.models.model_file.model import Model
from fedpdmc.study import parse_study, read_policy
from fedpdmc.study.read_data import read_records

DRUG = OWN.replace("ill ~ drug + age", "ill ~ drug")
QUIET = DRUG.replace("[dynamics]", '[dynamics]\nkind = "ZigZag"').replace('derivatives = "own"', 'derivatives = "none"')
# A term that is zero to second order at the prior's mean, and not zero for one age only; alone, and beside an honest effect.
CUBE = (
    SNOOP[: SNOOP.index("%1 = ")]
    + """\
%1 = sub age 1.5 : f64[]
%2 = square %1 : f64[]
%3 = mul %2 -1000000.0 : f64[]
%4 = exp %3 : f64[]
%5 = integer_pow other power=3 : f64[]
%6 = mul %5 %4 : f64[]
%7 = logaddexp eta 0.0 : f64[]
%8 = mul y eta : f64[]
%9 = sub %7 %8 : f64[]
%10 = add %9 %6 : f64[]
return %10
end
"""
)
HIDDEN = CUBE.replace(
    "%10 = add %9 %6 : f64[]\nreturn %10",
    """%10 = mul %6 1000000.0 : f64[]
%11 = mul other age : f64[]
%12 = square %11 : f64[]
%13 = add %10 %12 : f64[]
%14 = add %9 %13 : f64[]
return %14""",
)
# The second age is the middle of a part of the declared range, and nobody has it.
TWICE = (
    CUBE[: CUBE.index("%5 = ")]
    + f"""\
%5 = sub age {5.0 - 8.2 / 128!r} : f64[]
%6 = square %5 : f64[]
%7 = mul %6 -1000000.0 : f64[]
%8 = exp %7 : f64[]
%9 = add %4 %8 : f64[]
%10 = integer_pow other power=3 : f64[]
%11 = mul %10 %9 : f64[]
%12 = logaddexp eta 0.0 : f64[]
%13 = mul y eta : f64[]
%14 = sub %12 %13 : f64[]
%15 = add %14 %11 : f64[]
return %15
end
"""
)
# It jumps in the parameters for those above an age only.
JUMP = """fedpdmc model 1
title Binary regression with a jump for the old
predictor eta f64[]
column y f64[] binary
column age f64[] real
minus_log_likelihood
%1 = gt age 4.0 : bool[]
%2 = gt eta 0.0 : bool[]
%3 = and %1 %2 : bool[]
%4 = convert %3 : f64[]
%5 = logaddexp eta 0.0 : f64[]
%6 = mul y eta : f64[]
%7 = sub %5 %6 : f64[]
%8 = add %7 %4 : f64[]
return %8
end
"""


# The four points at which a file is tried are public.
TRIED = [float(2 * x) for x in np.random.default_rng(1).uniform(-1, 1, (model_trial.POINTS, 3))[:, 2]]


def lines_of(*made, first=7):
    """Lines of a model file: an honest model with an effect of age, and a term of one age whose factor is given."""
    head = SNOOP[: SNOOP.index("%1 = ")]
    own = ["sub age 1.5", "square %1", "mul %2 -1000000.0", "exp %3", "mul other age", "square %5"]
    own += [line.format(*range(first, first + 40)) for line in made]
    n = len(own)
    own += [f"mul %{n} %4", "logaddexp eta 0.0", "mul y eta", f"sub %{n + 2} %{n + 3}", f"add %{n + 4} %6"]
    own += [f"add %{n + 5} %{n + 1}"]
    return head + "\n".join(f"%{k} = {one} : f64[]" for k, one in enumerate(own, 1)) + f"\nreturn %{len(own)}\nend\n"


# Nothing at the points that are tried, and nothing but far out: a bump about 4 in a parameter.
BETWEEN = lines_of(
    *[f"sub other {p!r}" for p in TRIED], *[f"square {{{k}}}".replace("{", "%{") for k in range(4)],
    "mul %{4} %{5}", "mul %{8} %{6}", "mul %{9} %{7}", "mul %{10} 1000000.0",
)  # fmt: skip
FAR = lines_of("sub other 4.0", "square %{0}", "mul %{1} -50.0", "exp %{2}", "mul %{3} 100000.0")


def nested(times):
    first = MODEL_FILE.index("%1 = ")
    lines = [f"%{k} = logaddexp {'eta' if k == 1 else f'%{k - 1}'} y : f64[]" for k in range(1, times + 1)]
    return MODEL_FILE[:first] + "\n".join([*lines, f"return %{times}", "end", ""])


def study_of(text, contract):
    digest = hashlib.sha256(text.encode()).hexdigest()
    return parse_study(with_model_file(contract).replace(DIGEST, digest).encode(), lambda name: text.encode())


class Site(Guarded):
    """A site with one person of 65 (1.5 in the contract's units) and one of 95 (4.5), or without them."""

    def __init__(self, path, text, contract, present):
        super().__init__(path)
        self.study = study_of(text, contract)
        lines = [f"{'yes' if k % 3 else 'no'},{'verum' if k % 2 else 'placebo'},{40 + k % 20},A" for k in range(98)]
        lines += ["yes,verum,65,A", "no,placebo,95,A"] if present else ["yes,verum,50,A", "no,placebo,50,A"]
        (path / "north.csv").write_text("\n".join(["ill,drug,age,ward", *lines]) + "\n")
        (path / "policy.toml").write_text(
            CAREFUL.replace("most_operations = 20", "most_operations = 5000") + f'dataset = "{path}"\n'
        )

    def model(self):
        return self.study.potential(read_records(self.study, self.path / "north.csv"), "north")


@pytest.mark.parametrize(
    ("text", "contract", "found"),
    [
        (SNOOP, DRUG, "effective records contribute"),
        (CUBE, QUIET, "part in 64 of the range of 'age' may have a share of 1 of the gradient by 'other'"),
        (HIDDEN, QUIET, "part in 64 of the range of 'age' may have a share of"),
        (TWICE, QUIET, "part in 64 of the range of 'age' may have a share of 1 of the gradient by 'other'"),
        (JUMP, DRUG, "may jump"),
    ],
    ids=["snoop", "cube", "hidden", "twice", "jump"],
)
def test_joining_does_not_tell_whether_somebody_is_there(tmp_path, text, contract, found):
    answers = []
    for present in (True, False):
        site = Site(tmp_path / str(present), text, contract, present)
        with pytest.raises(InputError, match=found) as error:
            site.agent("north", tmp_path / f"store {present}")
        answers.append(str(error.value))
    assert answers[0] == answers[1]


@double_precision
def test_the_site_s_own_records_would_have_answered(tmp_path):
    """The control: the checks of before, on the records. One saw nothing of the cube, the other told who is there."""
    policy = read_policy(Site(tmp_path / "policy", CUBE, QUIET, True).path / "policy.toml")
    for text in (CUBE, HIDDEN):
        site = Site(tmp_path / "cube", text, QUIET, True)
        ModelDisclosure(site.study, site.model(), policy).check_start()
    absent, present = (Site(tmp_path / str(there), JUMP, QUIET, there) for there in (False, True))
    absent.model().sized(2, "north").check_continuity()
    with pytest.raises(Discontinuous):
        present.model().sized(2, "north").check_continuity()


def asked_along(agent, begin, speed):
    """The answers to the opening and to plans along the parameter that the author has added."""
    nothing = np.zeros(3), np.ones(3), 0, np.zeros((0, 0)), np.zeros(0), np.zeros(0)
    opening = messages.Open(RUN, 1, 4, 4, *nothing)
    assert isinstance(messages.decode(agent.answer(messages.encode(opening))), messages.Opened)
    # Downhill for all others, and up the bump of one person.
    velocity = np.broadcast_to([1.0, 1.0, speed], (4, 1, 3)).copy()
    start = np.broadcast_to([0.0, 0.0, begin], (4, 3)).copy()
    plans = messages.Plans(RUN, 2, np.zeros(4, int), start, np.full((4, 1), 0.4), velocity, np.arange(4))
    return messages.decode(agent.answer(messages.encode(plans)))


def made(path, text, contract, monkeypatch):
    """Sites with that person and without, with the check and without it. The file is tried once."""
    for k, (present, checked) in enumerate([(True, True), (False, True), (True, False), (False, False)]):
        agent = Site(path / str(k), text, contract, present).agent("north", path / f"store {k}")
        monkeypatch.setattr(start, "try_model_file", lambda *given: None)
        if not checked:
            agent.computation.shares = None
        yield agent
        agent.log.close()


@pytest.mark.parametrize(("text", "way"), [(BETWEEN, (-1.4, 1.0)), (FAR, (4.2, -1.0))], ids=["between", "far"])
def test_plans_through_a_place_where_one_person_counts_are_refused_whoever_is_there(tmp_path, monkeypatch, text, way):
    """Files that are nothing at the points at which they are tried. Without the check the arrivals tell who is there."""
    told = [asked_along(agent, *way) for agent in made(tmp_path, text, QUIET, monkeypatch)]
    assert [code(one) for one in told[:2]] == ["NARROW_PART"] * 2
    assert [one.rang.tolist() for one in told[2:]] == [[1] * 4, [0] * 4]


@pytest.mark.parametrize(
    ("text", "place"), [pytest.param(BETWEEN, 1.2, marks=pytest.mark.long), (FAR, 4.05)], ids=["between", "far"]
)
def test_releases_where_one_person_counts_are_refused_whoever_is_there(tmp_path, monkeypatch, text, place):
    """Without the check the refusal tells: by the records, it comes only if that person is there."""
    told = [code(derive(agent, [0.1, 0.2, place])) for agent in made(tmp_path, text, DRUG, monkeypatch)]
    assert told == ["NARROW_PART", "NARROW_PART", "FEW_RECORDS", None]


def test_an_honest_file_is_taken_and_a_family_is_not_tried(tmp_path, monkeypatch):
    Guarded(tmp_path).agent("north", tmp_path / "family").log.close()
    site = Site(tmp_path / "site", MODEL_FILE, OWN, True)
    site.agent("north", tmp_path / "store").log.close()
    tried = []
    monkeypatch.setattr(start, "try_model_file", lambda *given: tried.append(given))
    site.agent("north", tmp_path / "store").log.close()
    assert len(tried) == 1 and tried[0][0].model.file == "cloglog.fpm"


@pytest.mark.parametrize("times", [4000, 150])
def test_a_file_that_would_take_for_ever_is_refused_before_anything_is_traced_here(tmp_path, monkeypatch, times):
    """4,000 nested operations ran for more than 240 s, without a limit."""
    monkeypatch.setattr(model_trial, "MOST_SECONDS", 8)
    site = Site(tmp_path / "site", nested(times), OWN, True)
    monkeypatch.setattr(Model, "of", None)
    began = time.monotonic()
    with pytest.raises(InputError, match="more than 8 s of work or 16 GiB.*fewer operations"):
        site.agent("north", tmp_path / "store")
    assert time.monotonic() - began < 4 * 8 + 5


def test_memory_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(model_trial, "MOST_BYTES", 2**28)
    with pytest.raises(InputError, match="to be traced"):
        Site(tmp_path / "site", MODEL_FILE, OWN, True).agent("north", tmp_path / "store")
