"""Four hospitals as four processes in network namespaces of their own, behind a network that behaves badly."""

import contextlib
import subprocess

import numpy as np
import pytest
from tests.federation.processes import Parties
from tests.federation.proxy import Proxy
from tests.federation.studies import SEED, SITE_SEED, Folder, same_bits
from tests.study.contracts import POLICY

import fedpdmc as fp
from fedpdmc.certificates import make_keys
from fedpdmc.datasets import indomethacin
from fedpdmc.study import parse_study

TRIAL = indomethacin()
CONTRACT = f"""
format = 1
name = "indomethacin"
sites = {[hospital.name for hospital in TRIAL.hospitals]}
[model]
family = "logistic"
formula = "ill ~ indomethacin + risk + age + male"
[columns]
ill = {{ type = "level", levels = ["0", "1"] }}
indomethacin = {{ type = "number", bounds = [-10, 10] }}
risk = {{ type = "number", bounds = [-10, 10] }}
age = {{ type = "number", bounds = [-10, 10] }}
male = {{ type = "number", bounds = [-10, 10] }}
[prior]
scale = 2.5
[dynamics]
chains = 16
[run]
duration = 20.0
[releases]
derivatives = "own"
[limits]
rounds = 100000
observed_time = 1e6
"""


class Trial(Folder):
    """The trial's four hospitals; the smallest has three patients."""

    def __init__(self, path):
        self.path, self.contract, self.study = path, CONTRACT, parse_study(CONTRACT.encode())
        path.mkdir(parents=True, exist_ok=True)
        (path / "study.toml").write_text(CONTRACT)
        policy = POLICY.replace("least_records = 2", "least_records = 1")
        (path / "policy.toml").write_text(policy.replace("_per_record = 0.5", "_per_record = 5.0"))
        for hospital in TRIAL.hospitals:
            lines = ["ill,indomethacin,risk,age,male"]
            for y, row in zip(hospital.y, hospital.X, strict=True):
                lines.append(",".join([str(int(y)), *(repr(float(x)) for x in row[1:])]))
            (path / f"{hospital.name}.csv").write_text("\n".join(lines) + "\n")
        make_keys(path / "keys", self.study.sites)


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def namespaces(count):
    """Namespaces that each reach this one, and nothing else, over a cable of their own."""
    names = [f"fedpdmc{k}" for k in range(count)]
    try:
        try:
            for k, name in enumerate(names):
                ip("netns", "add", name)
                ip("link", "add", f"fpd{k}a", "type", "veth", "peer", "name", f"fpd{k}b", "netns", name)
                ip("addr", "add", f"10.213.{k}.1/30", "dev", f"fpd{k}a")
                ip("link", "set", f"fpd{k}a", "up")
                ip("-n", name, "addr", "add", f"10.213.{k}.2/30", "dev", f"fpd{k}b")
                ip("-n", name, "link", "set", f"fpd{k}b", "up")
        except (OSError, subprocess.CalledProcessError):
            yield None
        else:
            yield names
    finally:
        for k, name in enumerate(names):
            for words in (("link", "del", f"fpd{k}a"), ("netns", "del", name)):
                with contextlib.suppress(OSError, subprocess.CalledProcessError):
                    ip(*words)


@pytest.mark.long
def test_four_hospitals_behind_a_bad_network(tmp_path):
    folder = Trial(tmp_path)
    expected = folder.in_process()
    parties = ("coordinator", *folder.study.sites)
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(namespaces(len(parties)))
        inside = dict(zip(parties, spaces or (), strict=bool(spaces)))
        # Addresses in this namespace that the hospitals dial, and the coordinator's in its own.
        near = {name: f"10.213.{k}.1" if spaces else "127.0.0.1" for k, name in enumerate(parties)}

        def wrap(name, command):
            command = ["ip", "netns", "exec", inside[name], *command] if spaces else command
            if name == "coordinator":
                return command
            place = command.index("--coordinator") + 1
            return [*command[:place], proxies[name].address, *command[place + 1 :]]

        run = Parties(folder, (SEED, SITE_SEED), wrap, host="10.213.0.2" if spaces else "127.0.0.1")
        stack.callback(run.stop)
        proxies = {
            name: stack.enter_context(
                Proxy(
                    run.address,
                    delay=0.001 * k,
                    cut_after=7000 + 300 * k,
                    swap_after=5000 + 200 * k,
                    host=near[name],
                )
            )
            for k, name in enumerate(folder.study.sites)
        }
        run.start_all()
        run.finish(600)
        cuts, swaps = (sum(getattr(proxy, what) for proxy in proxies.values()) for what in ("cuts", "swaps"))
    post = fp.load(run.store("coordinator") / "posterior.zarr")
    assert same_bits(post, expected)
    assert cuts > 0 and swaps > 0, (cuts, swaps)
    np.testing.assert_array_equal(post.mean(), expected.mean())
