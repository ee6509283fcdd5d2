"""Records from files and real databases: the same numbers from each, and refusals by line and column."""

import os
import shutil
import sqlite3
import subprocess
import tempfile

import numpy as np
import polars as pl
import pytest
from tests.study.contracts import CONTRACT, rows, write_csv

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.study import parse_study, read_records
from fedpdmc.study.read_data import records_of_sites

STUDY = parse_study(CONTRACT.encode())
QUERY = "SELECT ill, drug, age FROM patients ORDER BY id"


def matrix(source, query=None, study=STUDY):
    records = read_records(study, source, query)
    return study.design.matrix(records), study.design.response(records)


def fill(execute, mark):
    execute("CREATE TABLE patients (id INTEGER, ill TEXT, drug TEXT, age INTEGER)")
    for i, record in enumerate(rows("north")):
        execute(f"INSERT INTO patients VALUES ({mark}, {mark}, {mark}, {mark})", (i, *record))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return matrix(write_csv(tmp_path_factory.mktemp("csv") / "north.csv", rows("north")))


def test_csv_gives_the_design(expected):
    X, y = expected
    wanted = [[1.0, float(drug == "verum"), (age - 50) / 10] for _, drug, age in rows("north")]
    np.testing.assert_array_equal(X, wanted)
    np.testing.assert_array_equal(y, [float(ill == "yes") for ill, _, _ in rows("north")])


def test_parquet_gives_the_same(tmp_path, expected):
    ill, drug, age = zip(*rows("north"), strict=True)
    pl.DataFrame({"age": age, "ill": ill, "drug": drug}).write_parquet(tmp_path / "north.parquet")
    for one, other in zip(matrix(tmp_path / "north.parquet"), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sqlite_gives_the_same_and_is_only_read(tmp_path, expected):
    path = tmp_path / "north.db"
    with sqlite3.connect(path) as connection:
        fill(connection.execute, "?")
    connection.close()
    for one, other in zip(matrix(f"sqlite:{path}", QUERY), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(InputError, match="readonly"):
        matrix(f"sqlite:{path}", "DELETE FROM patients")
    with pytest.raises(InputError, match="unable to open"):
        matrix(f"sqlite:{tmp_path / 'nowhere.db'}", QUERY)


@pytest.fixture(scope="module")
def postgres():
    """A server of its own, on a socket in a folder of its own; it does not run as root."""
    if shutil.which("initdb") is None or shutil.which("pg_ctl") is None:
        pytest.skip("no PostgreSQL server on this machine")
    with tempfile.TemporaryDirectory(prefix="fedpdmc-pg-") as folder:
        user = None
        if os.geteuid() == 0:
            user = "nobody"
            shutil.chown(folder, user)
        data = f"{folder}/data"

        def call(*command):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, user=user, cwd=folder)

        call("initdb", "-D", data, "-U", "reader", "--auth=trust", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        call("pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", options, "start")
        yield f"postgresql://reader@/postgres?host={folder}"
        call("pg_ctl", "-D", data, "-m", "immediate", "stop")


def test_postgresql_gives_the_same_and_is_only_read(postgres, expected):
    import psycopg

    with psycopg.connect(postgres) as connection:
        fill(connection.execute, "%s")
    for one, other in zip(matrix(postgres, QUERY), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(InputError, match="read-only"):
        matrix(postgres, "DELETE FROM patients RETURNING ill, drug, age")
    with pytest.raises(InputError, match="does not exist"):
        matrix(postgres, "SELECT * FROM nothing")


@pytest.mark.parametrize(
    ("row", "column", "value", "what"),
    [
        (3, "age", "", "a missing value"),
        (3, "age", "old", "text that is not a number ('old')"),
        (4, "age", "17", "out of bounds ('17')"),
        (4, "age", "nan", "a missing value"),
        (4, "drug", "NA", "a missing value"),
        (5, "age", "1e999", "not finite"),
        (6, "drug", "aspirin", "an unknown level ('aspirin')"),
        (6, "drug", "", "a missing value"),
        (1, "ill", "Yes", "an unknown level"),
    ],
)
def test_bad_values_are_refused_by_line_and_column(tmp_path, row, column, value, what):
    records = [dict(zip(("ill", "drug", "age"), record, strict=True)) for record in rows("north")]
    records[row - 1][column] = value
    path = write_csv(tmp_path / "north.csv", [tuple(record.values()) for record in records])
    with pytest.raises(InputError) as error:
        matrix(path)
    assert f"data ({path}), line {row + 1}, column {column!r}" in str(error.value)
    assert what in str(error.value)


def test_counts_and_logarithms(tmp_path):
    contract = CONTRACT.replace('"logistic"', '"poisson"\nexposure = "days"').replace("ill ~ drug + age", "falls ~ age")
    contract = contract.replace("[prior]", 'falls = { type = "count", bounds = [0, 50] }\n'
                                'days = { type = "number", bounds = [1, 365] }\n\n[prior]')  # fmt: skip
    study = parse_study(contract.encode())
    (tmp_path / "a.csv").write_text("falls,age,days\n2,40,7\n0,60,1\n")
    records = read_records(study, tmp_path / "a.csv")
    np.testing.assert_array_equal(records["days"], np.log([7.0, 1.0]))
    assert study.potential(records).records == 2
    (tmp_path / "b.csv").write_text("falls,age,days\n2,40,7\n0.5,60,1\n")
    with pytest.raises(InputError, match="line 3, column 'falls': found a number that is not whole"):
        read_records(study, tmp_path / "b.csv")


def test_wrong_sources_are_refused(tmp_path):
    for source, query in ((tmp_path / "a.xlsx", None), (tmp_path / "a.csv", "SELECT 1"), ("sqlite:a.db", None)):
        with pytest.raises(InputError, match="data"):
            read_records(STUDY, source, query)
    (tmp_path / "a.csv").write_text("ill,drug\nno,verum\n")
    with pytest.raises(InputError, match="no column 'age'"):
        read_records(STUDY, tmp_path / "a.csv")


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "twins.csv").write_text("ill,drug,age,age\nno,verum,30,90\n")
    with pytest.raises(InputError, match="two columns 'age'"):
        read_records(STUDY, tmp_path / "twins.csv")


@pytest.mark.parametrize(
    "source",
    [
        "postgresql://reader:hunter2@127.0.0.1:1/clinic",
        "postgresql://reader:hunter2@x@127.0.0.1:1/clinic",
        "postgresql://127.0.0.1:1/clinic?user=reader&password=hunter2",
        "postgresql://reader:hunter2/x@127.0.0.1:1/clinic",
        "postgresq://reader:hunter2@127.0.0.1:1/clinic",
    ],
)
def test_a_password_is_not_shown(source):
    query = "SELECT 1" if source.startswith("postgresql") else None
    with pytest.raises(InputError) as error:
        read_records(STUDY, source, query)
    assert "hunter2" not in str(error.value) and error.value.__cause__ is None


def test_all_faults_are_in_one_report_by_the_line_of_the_file(tmp_path):
    path = tmp_path / "north.csv"
    path.write_text('ward,ill,drug,age\nA,no,verum,40\n"a\nb",Yes,verum,17\nA,no,,old\n')
    with pytest.raises(InputError) as error:
        read_records(STUDY, path, site="north")
    said = str(error.value).splitlines()
    assert said[0] == f"data of site 'north' ({path}): found 4 faults in 2 of 3 records. Correct them:"
    # The second record goes over lines 3 and 4.
    assert said[1].startswith("  line 3, column 'ill': an unknown level ('Yes').")
    assert said[2].startswith("  line 3, column 'age': a value out of bounds ('17').")
    assert said[3].startswith("  line 5, column 'drug': a missing value. Remove or impute")
    assert said[4].startswith("  line 5, column 'age': text that is not a number ('old').")


def test_a_report_shows_twenty_faults_and_counts_the_rest(tmp_path):
    path = write_csv(tmp_path / "north.csv", [("no", "verum", 10)] * 30)
    with pytest.raises(InputError, match="30 faults in 30 of 30 records") as error:
        read_records(STUDY, path)
    assert str(error.value).count("column 'age'") == 20 and str(error.value).endswith("and 10 more.")
    pl.read_csv(path).write_parquet(tmp_path / "north.parquet")
    with pytest.raises(InputError, match="record 30, column 'age'|record 20, column 'age'"):
        read_records(STUDY, tmp_path / "north.parquet")


def test_records_with_missing_values_are_dropped_if_the_contract_says_so(tmp_path, caplog):
    study = parse_study(CONTRACT.replace("sites =", 'missing = "drop"\nsites =').encode())
    path = tmp_path / "north.csv"
    path.write_text("ill,drug,age\nno,verum,40\nno,NA,40\nyes,placebo,\nyes,placebo,60\n")
    records = read_records(study, path, site="north")
    np.testing.assert_array_equal(records["age"], [-1.0, 1.0])
    assert f"data of site 'north' ({path}): 2 of 4 records (50 %) dropped for a missing value" in caplog.text
    path.write_text("ill,drug,age\nno,verum,40\nno,NA,40\nyes,placebo,999\n")
    with pytest.raises(InputError, match="line 4, column 'age': found a value out of bounds"):
        read_records(study, path)
    path.write_text("ill,drug,age\nno,NA,40\n")
    with pytest.raises(InputError, match="missing value in each of 1 records"):
        read_records(study, path)


def test_a_site_without_records_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("ill,drug,age\n")
    with pytest.raises(InputError, match="site 'south'.*no records"):
        read_records(STUDY, tmp_path / "a.csv", site="south")


FOUR = parse_study(CONTRACT.replace('"south"]', '"south", "west", "east"]').encode())


def four_files(folder):
    """Records of four sites, all faulty but the second."""
    sources = {name: (write_csv(folder / f"{name}.csv", rows(name)), None) for name in FOUR.sites}
    (folder / "north.csv").write_text("ill,drug,age\nno,verum,40\nYes,verum,17\nno,,old\n")
    write_csv(folder / "west.csv", [("no", "verum", 10)] * 30)
    (folder / "east.csv").write_text("ill,drug\nno,verum\nno,vrum\n")
    return sources


def test_the_faults_of_all_sites_are_in_one_report(tmp_path):
    with pytest.raises(InputError) as error:
        records_of_sites(FOUR, four_files(tmp_path))
    said = str(error.value).splitlines()
    assert said[0] == "data: found 36 faults at 3 of 4 sites. Correct them:"
    north, west, east = (said.index(f"  data of site '{name}' ({tmp_path / name}.csv): {what}") for name, what in (
        ("north", "4 faults in 2 of 3 records"), ("west", "30 faults in 30 of 30 records"),
        ("east", "2 faults in 1 of 2 records"),
    ))  # fmt: skip
    assert north < west < east and "south" not in str(error.value)
    assert said[north + 1].startswith("    line 3, column 'ill': an unknown level ('Yes').")
    assert said[north + 4].startswith("    line 4, column 'age': text that is not a number ('old').")
    assert said[west + 1].endswith("column 'age': a value out of bounds ('10'). The declared bounds are 18 to 100.")
    assert said[west + 2] == "    line 3, column 'age': a value out of bounds ('10')."
    assert said[east - 1] == "    and 16 more."
    assert said[east + 1].startswith("    no column 'age'. Give the columns")
    assert said[east + 2].startswith("    line 3, column 'drug': an unknown level ('vrum').")
    # Twenty faults in all; every site's first ones are among them.
    assert sum(line.startswith("    ") for line in said) == 20 + 1


def test_many_faulty_sites_are_counted(tmp_path):
    names = [f"site{k}" for k in range(25)]
    study = parse_study(CONTRACT.replace('"north", "south"', ", ".join(f'"{name}"' for name in names)).encode())
    path = write_csv(tmp_path / "all.csv", [("no", "verum", 10)] * 2)
    with pytest.raises(InputError, match="50 faults at 25 of 25 sites") as error:
        records_of_sites(study, {name: (path, None) for name in names})
    assert str(error.value).count("line 2, column 'age'") == 20
    assert str(error.value).endswith("  and 10 faults at 5 more sites.")


def test_what_is_wrong_at_one_site_is_told_as_if_it_were_alone(tmp_path):
    sources = four_files(tmp_path)
    for name in ("north", "west"):
        write_csv(tmp_path / f"{name}.csv", rows(name))
    (tmp_path / "east.csv").unlink()
    with pytest.raises(InputError, match=r"^data of site 'east': found .*east.csv: .*No such file"):
        records_of_sites(FOUR, sources)


def test_nothing_is_written_before_all_records_are_good(tmp_path):
    data = {name: source for name, (source, _) in four_files(tmp_path).items()}
    with pytest.raises(InputError, match="36 faults at 3 of 4 sites"):
        fp.connect(FOUR, data=data, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_records_with_missing_values_are_dropped_at_every_site_and_counted_once(tmp_path, caplog):
    study = parse_study(CONTRACT.replace("sites =", 'missing = "drop"\nsites =').encode())
    text = "ill,drug,age\nno,verum,40\nno,NA,40\nyes,placebo,\nyes,placebo,60\n"
    data = {name: tmp_path / f"{name}.csv" for name in study.sites}
    for path in data.values():
        path.write_text(text)
    with fp.connect(study, data=data) as connection:
        assert [agent.site.records for agent in connection.transport.agents] == [2, 2]
    for name, path in data.items():
        said = f"data of site {name!r} ({path}): 2 of 4 records (50 %) dropped for a missing value"
        assert caplog.text.count(said) == 1
    # Faults are found beside what is dropped.
    data["north"].write_text(text + "no,verum,10\n")
    data["south"].write_text("ill,drug,age\nno,NA,40\n")
    with pytest.raises(InputError, match="2 faults at 2 of 2 sites") as error:
        fp.connect(study, data=data)
    assert "line 6, column 'age': found a value out of bounds ('10')" in str(error.value)
    assert "found a missing value in each of 1 records" in str(error.value)


def test_a_damaged_parquet_file_is_refused_and_ends_nothing(tmp_path):
    """At some the reader panics, at others its process ends; here it does so in another process."""
    path = tmp_path / "north.parquet"
    pl.DataFrame({"ill": ["no", "yes"] * 8, "drug": ["verum"] * 16, "age": [30] * 16}).write_parquet(path)
    content = path.read_bytes()
    for wrong in (b"", content[:-9], content[:4] + b"\xff" * 40 + content[44:]):
        path.write_bytes(wrong)
        with pytest.raises(InputError, match="Give a file that can be read"):
            read_records(STUDY, path)
