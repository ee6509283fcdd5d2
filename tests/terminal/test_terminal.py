"""Everything that shows progress, on a real terminal."""

import sys

from tests.terminal.pseudo import Terminal

SAMPLE = """
import sys
from tests.support import hospitals, prior
import fedpdmc as fp

post = fp.sample(hospitals(), prior(), chains=4, ess=30, seed=3)
post = post.extend(duration=5.0)
print("rounds:", post.rounds)
"""


def test_sample_and_extend_on_a_terminal():
    with Terminal([sys.executable, "-c", SAMPLE]) as terminal:
        assert terminal.finish() == 0, terminal.text
    assert "rounds:" in terminal.text
    assert "Traceback" not in terminal.text
