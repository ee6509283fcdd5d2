"""A run resumed from its store: the same bits, no request twice, and nothing of an interrupted block."""

import numpy as np
import pytest
from tests.federation.studies import SEED, SITE_SEED, same_bits

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.federation import messages


@pytest.fixture
def connect(folder, tmp_path):
    """Connect to the sites in this process, with a store; ``asked`` collects the requests to the first site."""

    def connect(asked=None, fails_at=None, store=tmp_path / "run"):
        seeds = dict.fromkeys(folder.study.sites, SITE_SEED)
        connection = fp.connect(folder.study, data=folder.data, seed=SEED, site_seeds=seeds, store=store)
        ask = connection.transport.ask

        def counted(requests):
            if asked is not None:
                asked.append(requests[0].data)
            if fails_at is not None and len(asked) == fails_at:
                raise KeyboardInterrupt
            return ask(requests)

        connection.transport.ask = counted
        return connection

    return connect


def test_a_finished_run_asks_the_sites_nothing(connect, expected):
    asked = []
    with connect() as connection:
        first = fp.sample(connection, progress=False)
    with connect(asked) as connection:
        again = fp.sample(connection, progress=False)
    assert not asked and same_bits(first, expected) and same_bits(again, expected)
    assert again.rounds == expected.rounds
    np.testing.assert_array_equal(again.bytes, first.bytes)
    np.testing.assert_array_equal(again.gradient_evaluations, expected.gradient_evaluations)


def test_an_interrupted_block_is_sampled_again_to_the_same_bits(connect, expected):
    """The second process sends the requests of the unfinished block again, byte for byte, and goes on after it."""
    before, after = [], []
    with connect(before, fails_at=expected.rounds // 2) as connection:
        with pytest.raises(KeyboardInterrupt):
            fp.sample(connection, progress=False)
    with connect(after) as connection:
        post = fp.sample(connection, progress=False)
    numbers = [[messages.decode(data).sequence for data in sent] for sent in (before, after)]
    # From the last block, not from the start; the two exchanges of the opening are not rounds.
    assert 1 < numbers[1][0] <= numbers[0][-1] and numbers[1][-1] == expected.rounds + 3
    sent = dict(zip(numbers[0], before, strict=True))
    assert all(sent.get(number, data) == data for number, data in zip(numbers[1], after, strict=True))
    assert same_bits(post, expected) and post.rounds == expected.rounds
    np.testing.assert_array_equal(post.events, expected.events)


def test_a_store_of_another_contract_or_seed_is_refused(connect, folder, tmp_path):
    with connect():
        pass
    with pytest.raises(InputError, match=f"The run in this store has seed {SEED}"):
        fp.connect(folder.study, data=folder.data, seed=SEED + 1, store=tmp_path / "run")
    other = folder.path / "other.toml"
    other.write_text(folder.contract + "\n# changed\n")
    with pytest.raises(InputError, match="another contract"):
        fp.connect(other, data=folder.data, store=tmp_path / "run")
