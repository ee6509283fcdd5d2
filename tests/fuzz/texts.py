"""Parsers of texts and single files: contracts, policies, formulas, records, keys, bundles, options, the status page."""

import importlib.util
import io
import json
import re
import sqlite3
import zipfile
from pathlib import Path

import polars as pl
from msgspec.structs import replace
from tests.federation.studies import SUMMED, ZIGZAG
from tests.federation.test_private_studies import PRIVATE
from tests.fuzz.engine import Target
from tests.study.contracts import CONTRACT, MODEL_FILE, POLICY, rows, write_csv

from fedpdmc import certificates as keys
from fedpdmc.assessment.all_sites import Assessment
from fedpdmc.assessment.at_site import SiteAssessment
from fedpdmc.assessment.loo import LOO
from fedpdmc.certificates import request_certificate, sign_request
from fedpdmc.cli.study import _by_site, _seed
from fedpdmc.errors import InputError
from fedpdmc.federation.grpc.tls import check_loopback, check_party, split_address
from fedpdmc.models.families import family
from fedpdmc.models.model_file.model import Model
from fedpdmc.operations import bundle
from fedpdmc.study import parse_study, read_policy
from fedpdmc.study.formula import Design
from fedpdmc.study.read_data import check_cells, read_records, shown

TOML = tuple(
    b'[model] [columns] [prior] [dynamics] [run] [releases] [limits] [privacy] [coordinates] "poisson" "linear" "student_t"'
    b' df = 3.0 offset = "age" scale = flat = true kind = "ZigZag" reference = "laplace" control = "quadratic" log = true'
    b' "count" "level" "number" "noisy" "summed" method = "private-laplace" epsilon = 1.0 delta = 1e-6 region = 2.0'
    b' hours = [20,6] [certificates] least_pinned = 3 total_epsilon = 1.0 total_delta = 1e-6'.split(b" ")
)  # fmt: skip
FAMILY_FILES = (("weibull", {}), ("ordered_logit", {"levels": 3}), ("piecewise_exponential", {"pieces": 3}))
OPERATIONS_AND_TYPES = tuple(
    b"%1 %2 = : f64[] i64[] bool[] f64[3] f64[2,3] axes=[0] axis=0 return end variables parameter column constant "
    b"group predictor exp dot reduce_sum gather slice broadcast iota cumsum 1.0 -inf nan 99999 positive index".split(
        b" "
    )
)
FORMULAS = tuple(
    b"~ + - * : ** ^ ( ) . 0 1 2 22 I( log( C( poly( bs( `age` {age} drug ill age | / %in% a[0] \\ # @".split()
)
SECRET = "hunter2secret"


def contracts(folder: Path) -> Target:
    """The contract, with its formula, names and budget."""

    def read(data: bytes):
        study = parse_study(data)
        study.names, study.guess, study.reach, study.prior(), study.dynamics()  # noqa: B018

    linear = CONTRACT.replace('"logistic"', '"linear"').replace("ill ~ drug + age", "age ~ drug")
    some = '\n[coordinates]\nnorth = ["Intercept", "age"]\n'
    samples = [CONTRACT, ZIGZAG, SUMMED, PRIVATE, linear, ZIGZAG + some]
    return Target("contract", [one.encode() for one in samples], read, TOML + FORMULAS)


def model_files(folder: Path) -> Target:
    """A model file: what is accepted is its own usual text."""

    def read(data: bytes):
        if Model.parse(data).text.encode() != data:
            raise AssertionError("a text that is not its own")

    samples = [MODEL_FILE, *(family(name, **sizes).text for name, sizes in FAMILY_FILES)]
    return Target("model file", [one.encode() for one in samples], read, OPERATIONS_AND_TYPES)


def policies(folder: Path) -> Target:
    """A site's policy, and a contract checked against it."""
    path, study = folder / "policy.toml", parse_study(CONTRACT.encode())

    def read(data: bytes):
        path.write_bytes(data)
        read_policy(path).check("north", study, 12)

    print_ = ":".join(["3f"] * 32)
    more = f'hours = [20, 6]\ntotal_epsilon = 1.0\ntotal_delta = 1e-6\n[certificates]\nsouth = "{print_}"\n'
    return Target("policy", [POLICY.encode(), (POLICY + more).encode()], read, TOML)


def formulas(folder: Path) -> Target:
    """A formula over declared columns."""
    columns = parse_study(CONTRACT.encode()).columns

    def read(data: bytes):
        design = Design(data.decode("utf-8", "replace"), columns)
        design.check_response("logistic")
        design.largest  # noqa: B018

    samples = [b"ill ~ drug + age", b"ill ~ drug * age", b"ill ~ 0 + drug:age", b"ill ~ (drug + age)**2 - age"]
    return Target("formula", samples, read, FORMULAS)


def _records_target(name: str, path: Path, samples: list[bytes], words=(), query=None) -> Target:
    studies = [
        parse_study(CONTRACT.replace("format", f'missing = "{how}"\nformat', 1).encode()) for how in ("refuse", "drop")
    ]
    source = f"sqlite:{path}" if query else path

    def read(data: bytes):
        path.write_bytes(data)
        for study in studies:
            found = read_records(study, source, query)
            check_cells(study, found, 1)
            study.matrix(found, "north")

    return Target(name, samples, read, words)


def csv(folder: Path) -> Target:
    """Records in a CSV file."""
    path = write_csv(folder / "records.csv", rows("north"))
    quoted = b'"ill","drug","age"\r\n"yes","verum","33"\r\n"no","placebo",""\r\n'
    words = tuple(
        b'ill drug age ward no yes placebo verum NA N/A NaN null 1e400 \xef\xbb\xbf \x00 " , ; \t 018 +33 3_3 0x21'.split(
            b" "
        )
    )
    return _records_target("csv", path, [path.read_bytes(), quoted, b"ill,drug,age\nno,verum,20\n" * 1], words)


def parquet(folder: Path) -> Target:
    """Records in a Parquet file."""
    path, samples = folder / "records.parquet", []
    frame = pl.DataFrame(rows("north"), schema=["ill", "drug", "age"], orient="row")
    for one in (frame, frame.with_columns(pl.col("age").cast(pl.Float32), pl.col("ill").cast(pl.Categorical))):
        for compression in ("uncompressed", "zstd"):
            one.write_parquet(path, compression=compression)
            samples.append(path.read_bytes())
    return _records_target("parquet", path, samples)


def sqlite(folder: Path) -> Target:
    """Records in an SQLite file."""
    path = folder / "records.db"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE patients (ill TEXT, drug TEXT, age REAL)")
        base.executemany("INSERT INTO patients VALUES (?, ?, ?)", rows("north"))
    base.close()
    return _records_target("sqlite file", path, [path.read_bytes()], query="SELECT ill, drug, age FROM patients")


def queries(folder: Path) -> Target:
    """A query, which is the site's own; it gets a clear error too."""
    path, study = folder / "queries.db", parse_study(CONTRACT.encode())
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE patients (ill TEXT, drug TEXT, age REAL)")
        base.executemany("INSERT INTO patients VALUES (?, ?, ?)", rows("north"))
    base.close()
    content = path.read_bytes()

    def read(data: bytes):
        try:
            read_records(study, f"sqlite:{path}", data.decode("utf-8", "surrogateescape"))
        finally:
            assert path.read_bytes() == content, "the database was written"

    words = tuple(
        b"SELECT FROM WHERE UNION ALL JOIN ON AS ill drug age patients * NULL 1 x'00' ATTACH PRAGMA DELETE ; --".split()
    )
    return Target(
        "query",
        [b"SELECT ill, drug, age FROM patients", b"SELECT ill, drug, age + 1 AS age FROM patients WHERE age > 30"],
        read,
        words,
    )


def addresses(folder: Path) -> Target:
    """Addresses: of parties, and of databases, whose passwords are never shown."""
    study = parse_study(CONTRACT.encode())

    def read(data: bytes):
        text = data.decode("utf-8", "replace")
        if not text.startswith("postgres") or len(samples) == 3:
            check_loopback(split_address(text, "listen")[0], "listen")
            return
        # Nobody listens on this port: whatever the address says is parsed, and no name is looked up.
        told = f"postgresql://reader:{SECRET}@127.0.0.1:1/{re.sub(r'(?i)(host|service)', '', text[13:])}"
        try:
            read_records(study, told, "SELECT 1")
        except InputError as error:
            assert SECRET not in str(error), "a password is shown"
            raise
        finally:
            assert SECRET not in shown(told)

    samples = [b"192.0.2.7:4433", b"[::1]:8080", b"localhost:1"]
    if importlib.util.find_spec("psycopg"):
        samples += [b"postgresql://clinic", b"postgresql://clinic?connect_timeout=1&user=x"]
    return Target("address", samples, read, (b"?password=x", b"&", b"@", b"sslmode=", b"%40", b":", b"]", b"65536"))


def stall_options(folder: Path) -> Target:
    """The command and the webhook of ``--on-stall`` and ``--stall-webhook``."""
    from fedpdmc.operations.status import alerts

    def read(data: bytes):
        text = data.decode("utf-8", "surrogateescape")
        alerts(text, None) if text.startswith("mail") else alerts(None, text)

    return Target(
        "stall option",
        [b"https://host:8/hook?x=1", b"http://[::1]/", b"mail -s 'stall' me"],
        read,
        (b"@", b"//", b"[", b"::"),
    )


def options(folder: Path) -> Target:
    """Options of the command line that have a form."""

    def read(data: bytes):
        text = data.decode("utf-8", "surrogateescape")
        for value in _by_site(text.split("\n"), "site-seed").values():
            _seed(value)

    return Target(
        "option", [b"north=5", b"north=5\nsouth=12", b"north=records.csv"], read, (b"north=", b"=", "٣".encode())
    )


def credentials(folder: Path) -> Target:
    """A folder of keys: certificates, keys, revocations, requests, the authority."""
    home = keys.make_keys(folder / "keys", ["north"])
    request, _ = request_certificate(folder / "own", "north")
    party = home / "sites" / "north"
    keys.revoke(party, ["3f" * 32])
    files = [party / "certificate.pem", party / "key.pem", party / "authority.pem", party / keys.REVOKED, request,
             home / "authority" / "key.pem", home / "authority" / "certificate.pem"]  # fmt: skip
    content = [path.read_bytes() for path in files]
    good = keys.read_credentials(party)
    signature = keys.sign(good, b"data")

    def read(data: bytes):
        which = data[0] % len(files) if data else 0
        files[which].write_bytes(data[1:])
        try:
            keys.signer(good, data[1:], signature, b"data")
            own = keys.read_credentials(party)
            check_party(own, "north")
            keys.expiry(own.certificate), keys.names(own.certificate)
            keys.signer(own, own.certificate, signature, b"data")
            own.certificate in (own.revoked or ())  # noqa: B015
            sign_request(home / "authority", request, "north", folder / "signed")
        finally:
            files[which].write_bytes(content[which])

    samples = [bytes([which]) + one for which, one in enumerate(content)]
    return Target("keys and certificates", samples, read, (b"-----BEGIN CERTIFICATE-----\n", b"-----END", b"3f:", b"#"))


def assessments(folder: Path) -> Target:
    """What a site has written of its fit: read, and shown beside others as text and HTML."""
    numbers = dict.fromkeys(LOO, 1.0)
    checks = {"mean": {"p": 0.5, "observed": 0.3, "replicated": 0.31, "sd": 0.1}}
    without = {"mean": {"age": 0.1}, "sd": {"age": 0.2}, "k": 0.3}
    told = SiteAssessment("north", "study", "00", "11", 20, numbers, checks, {"age": 0.1}, without)
    path = folder / "north.json"
    other = replace(told, site="south")

    def read(data: bytes):
        path.write_bytes(data)
        found = SiteAssessment.read(path)
        shown = Assessment([found, other] if found.site != "south" else [found])
        repr(shown), shown.without  # noqa: B018
        assert b"<script" not in shown._repr_html_().encode("utf-8", "replace"), "a script"

    bare = replace(told, loo=None, checks=None, pull=None, without=None)
    samples = [one.write(path).read_bytes() for one in (told, bare)]
    words = (b"null", b"NaN", b"Infinity", b'"<script>"', b'{"p": 1.0}', b'"k": ', b"1e400", b'"format": 1')
    return Target("assessment", samples, read, words)


def bundles(folder: Path) -> Target:
    """The file that a site is sent: its bytes, and whole archives of changed members."""
    home = keys.make_keys(folder / "bundle-keys", ["north", "south"])
    study, path = folder / "bundle.toml", folder / "bundle.zip"
    study.write_text(CONTRACT)
    bundle.make_bundle(study, home / "coordinator" / "authority.pem", "192.0.2.7:4433", path)
    with zipfile.ZipFile(path) as file:
        members = [(info.filename, file.read(info)) for info in file.infolist()]

    def read(data: bytes):
        if data[:1] == b"Z":
            path.write_bytes(data[1:])
        else:
            which = data[0] % len(members) if data else 0
            out = io.BytesIO()
            with zipfile.ZipFile(out, "w") as file:
                for place, (name, content) in enumerate(members):
                    file.writestr(name, data[1:] if place == which else content)
            path.write_bytes(out.getvalue())
        found = bundle.read_bundle(path)
        found.study.names  # noqa: B018

    samples = [b"Z" + path.read_bytes(), *(bytes([place]) + content for place, (_, content) in enumerate(members))]
    return Target("bundle", samples, read, (b'"format": 1', b'"coordinator":', b"PK\x03\x04", b"PK\x01\x02", *TOML))


def status_requests(folder: Path) -> Target:
    """Requests to the status page: whatever comes, the handler answers or hangs up, and the same page is served."""
    from fedpdmc.operations import status_page as http_server

    class Connection:
        def __init__(self, data: bytes):
            self.data, self.sent = io.BytesIO(data), io.BytesIO()

        def makefile(self, *_, **__):
            return self.data

        def sendall(self, data):
            self.sent.write(data)

        def settimeout(self, _):
            pass

    class Host:
        facts = staticmethod(lambda: {"party": "site"})
        known = http_server._Server.known
        _name = "127.0.0.1"

    pages = {path: ("text/plain", lambda facts: json.dumps(facts)) for path in http_server.PAGES}

    def read(data: bytes):
        before, http_server.PAGES = http_server.PAGES, pages
        try:
            connection = Connection(data)
            http_server._Handler(connection, ("127.0.0.1", 1), Host())
        finally:
            http_server.PAGES = before
        said = connection.sent.getvalue()
        assert not said.startswith(b"HTTP/1") or b"200" in said[:20] or b"party" not in said, "content with an error"

    samples = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /status.json HTTP/1.0\r\nHost: [::1]:80\r\n\r\n",
        b"GET /metrics\r\n",
    ]
    return Target(
        "status request",
        samples,
        read,
        (b"Host: ", b"HTTP/1.1", b"HTTP/9", b"POST ", b"Content-Length: ", b"\r\n", b"[", b"/healthz"),
    )


TARGETS = (
    contracts,
    model_files,
    policies,
    formulas,
    csv,
    parquet,
    sqlite,
    queries,
    addresses,
    options,
    stall_options,
    credentials,
    bundles,
    assessments,
    status_requests,
)
