"""A small study with its records and keys, sites in threads, and runs to compare."""

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.study.contracts import CONTRACT, MODEL_FILE, POLICY, model_file, rows, with_model_file, write_csv

import fedpdmc as fp
from fedpdmc.certificates import make_keys, read_credentials
from fedpdmc.federation.grpc.client import serve
from fedpdmc.federation.joint_plans import JointRandomness, OwnPlans, joint_seed
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.study import parse_study

SEED, SITE_SEED = 3, 5
# Zig-Zag in the parameters' own coordinates: many short rounds, and little to compile.
ZIGZAG = CONTRACT.replace("[dynamics]", '[dynamics]\nkind = "ZigZag"\nexcess = 0.1').replace(
    'derivatives = "own"', 'derivatives = "none"'
)
FEW_ROUNDS = CONTRACT
# The same studies with a model file.
MODEL_ZIGZAG, MODEL_FEW_ROUNDS = with_model_file(ZIGZAG), with_model_file(FEW_ROUNDS)
SUMMED = CONTRACT.replace('"south"]', '"south", "west"]').replace('derivatives = "own"', 'derivatives = "summed"')


class Folder:
    """A study on disk: contract, policy, records and keys of all parties."""

    def __init__(self, path: Path, contract: str = ZIGZAG):
        self.path, self.contract = path, contract
        self.study = parse_study(contract.encode(), model_file)
        path.mkdir(parents=True, exist_ok=True)
        (path / "cloglog.fpm").write_text(MODEL_FILE)
        (path / "study.toml").write_text(contract)
        (path / "policy.toml").write_text(POLICY)
        for name in self.study.sites:
            write_csv(path / f"{name}.csv", rows(name))
        make_keys(path / "keys", self.study.sites)

    @property
    def data(self):
        return {name: self.path / f"{name}.csv" for name in self.study.sites}

    def agent(self, name, store=None, seed=SITE_SEED):
        return open_agent(
            self.study, name, self.data[name], store=store or self.path / "sites" / name, seed=seed,
            credentials=read_credentials(self.keys(name)),
        )  # fmt: skip

    def keys(self, name):
        return self.path / "keys" / ("coordinator" if name == "coordinator" else f"sites/{name}")

    @property
    def joint_seed(self):
        """The seed of the public stream of `connected`."""
        sites = [OwnPlans(self.study, name, f"own/{SITE_SEED}")._seed for name in self.study.sites]
        return joint_seed([JointRandomness(self.study, SEED)._own, *sites])

    def connected(self, store=None):
        """A connection to all sites in this process, each with its own seed."""
        seeds = dict.fromkeys(self.study.sites, SITE_SEED)
        return fp.connect(self.study, data=self.data, seed=SEED, site_seeds=seeds, store=store)

    def in_process(self, **options):
        """The run with all sites in this process."""
        with self.connected() as connection:
            return fp.sample(connection, progress=False, **options)

    def crashed_and_resumed(self, store, rounds, **options):
        """The same run, stopped after some rounds and resumed from its store; the sequence numbers at the stop."""
        with self.connected(store) as connection:
            ask, left = connection.transport.ask, iter(range(rounds))

            def crash(requests):
                if next(left, None) is None:
                    raise RuntimeError("pulled the plug")
                return ask(requests)

            connection.transport.ask = crash
            with pytest.raises(RuntimeError, match="pulled the plug"):
                fp.sample(connection, progress=False, **options)
            sequence = connection.federation.sequence.tolist()
        with self.connected(store) as connection:
            return fp.sample(connection, progress=False, **options), sequence

    def listening(self, **options):
        """A coordinator that listens, with TLS."""
        options = {"listen": "127.0.0.1:0", "keys": self.keys("coordinator"), "seed": SEED, **options}
        return fp.connect(self.study, **options)

    @contextlib.contextmanager
    def sites(self, connection, agents=None, address=None):
        """Sites in threads that dial in; when the block ends the coordinator hangs up and they stop."""
        stop, threads, errors = threading.Event(), [], []

        def run(agent, name):
            try:
                serve(agent, address or connection.address, read_credentials(self.keys(name)), stop.wait)
            except Exception as error:  # noqa: BLE001
                errors.append(error)

        agents = agents or {name: self.agent(name) for name in self.study.sites}
        for name, agent in agents.items():
            threads.append(threading.Thread(target=run, args=(agent, name)))
            threads[-1].start()
        try:
            yield agents
        finally:
            stop.set()
            connection.close()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
            for agent in agents.values():
                agent.log.close()
        assert not errors, errors


def same_bits(one, other):
    """Whether two posteriors have the same skeleton, to the bit."""
    a, b = one.skeleton, other.skeleton
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("offsets", "t", "a", "v"))
