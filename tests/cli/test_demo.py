import numpy as np
import pytest
from typer.testing import CliRunner

import fedpdmc as fp
from fedpdmc.cli import app
from fedpdmc.cli.demo import CoefficientSummary, _print_comparison


def test_demo_agrees_with_pooled_nuts_and_saves(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "The two agree" in result.output
    assert "bounds certified" in result.output
    assert (tmp_path / "forest.png").read_bytes().startswith(b"\x89PNG")
    post = fp.load(str(tmp_path / "posterior.zarr"))
    # The trial's own finding: about half the odds on the drug, interval clear of 1.
    draws = post.draws(500)[..., 1]
    assert np.quantile(np.exp(draws), 0.975) < 1.0
    assert 0.35 < np.exp(np.median(draws)) < 0.6


@pytest.mark.parametrize("shift, stretch", [(0.2, 1.0), (0.0, 1.2)])
def test_comparison_catches_a_wrong_mean_and_a_wrong_spread(shift, stretch):
    class Silent:
        def print(self, *_):
            pass

    zero, one, names = np.zeros(2), np.ones(2), ("p", "q")
    truth = CoefficientSummary(zero, one, np.full(2, 2000.0), np.zeros((5, 2)))
    wrong = CoefficientSummary(zero + [0.0, shift], one * [1.0, stretch], np.full(2, 2000.0), np.zeros((5, 2)))
    assert _print_comparison(Silent(), truth, truth, names)
    assert not _print_comparison(Silent(), wrong, truth, names)
