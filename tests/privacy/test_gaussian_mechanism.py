import numpy as np
import pytest
from scipy import stats

from fedpdmc.privacy.gaussian_mechanism import SecretIntegers, noise_multiplier, noise_scale, release, release_symmetric


def test_the_noise_is_the_discrete_gaussian_and_new_for_every_key():
    sigma, count = 3, 4000
    k = np.arange(-60, 61)
    law = np.exp(-(k**2) / (2 * sigma**2)) / np.exp(-(k**2) / (2 * sigma**2)).sum()
    draws = {}
    for key in (b"key", b"yek"):
        source = SecretIntegers(key)
        draws[key] = np.array([source.gaussian(sigma) for _ in range(count)])
        seen = np.array([np.sum(draws[key] == value) for value in range(-6, 7)])
        inside = law[(k >= -6) & (k <= 6)]
        expected = np.append(inside, 1 - inside.sum()) * count
        assert stats.chisquare(np.append(seen, count - seen.sum()), expected).pvalue > 1e-3
        # Of another width it is not.
        wrong = np.exp(-(k**2) / (2 * 3.3**2)) / np.exp(-(k**2) / (2 * 3.3**2)).sum()
        wrong = np.append(wrong[(k >= -6) & (k <= 6)], 0)
        wrong[-1] = 1 - wrong.sum()
        assert stats.chisquare(np.append(seen, count - seen.sum()), wrong * count).pvalue < 1e-3
    assert abs(np.corrcoef(draws[b"key"], draws[b"yek"])[0, 1]) < 4 / np.sqrt(count)
    again = SecretIntegers(b"key")
    assert [again.gaussian(sigma) for _ in range(9)] == draws[b"key"][:9].tolist()


def test_the_pieces_of_the_law_are_exact_in_the_mean():
    source, count = SecretIntegers(b"pieces"), 4000
    for above, below in ((1, 3), (7, 3), (0, 5), (1, 1)):
        hits = sum(source.decays(above, below) for _ in range(count))
        chance = np.exp(-above / below)
        assert abs(hits - count * chance) <= 4 * np.sqrt(count * chance * (1 - chance)) + 1e-9
    drawn = np.array([source.below(10) for _ in range(count)])
    assert stats.chisquare(np.bincount(drawn, minlength=10)).pvalue > 1e-3 and source.below(1) == 0


def test_a_release_has_the_noise_it_says_and_no_bits_below_it():
    values = np.linspace(-3, 3, 3000)
    noise = release(values, 0.5, b"key") - values
    assert stats.kstest(noise / 0.5, "norm").pvalue > 1e-3
    # Half the noise would be seen.
    assert stats.kstest(noise / 0.25, "norm").pvalue < 1e-6
    grid = release(values, 0.5, b"key") * 2.0**31
    np.testing.assert_array_equal(grid, np.round(grid))
    np.testing.assert_array_equal(release(values, 0.0, b"key"), values)


def test_neighbours_reach_the_same_values_with_the_same_noise():
    """Of a sum of floats the last bits tell which numbers were added; of integers they do not."""
    noise = np.array([release(np.array([0.1]), 1.0, b"%d" % k)[0] for k in range(50)])
    other = np.array([release(np.array([0.1 + 0.7]), 1.0, b"%d" % k)[0] for k in range(50)])
    shift = (other - noise) * 2.0**30
    np.testing.assert_array_equal(shift, np.full(50, shift[0]))
    assert shift[0] == round(shift[0])


def test_noise_makes_up_for_rounding_and_for_the_grid():
    sigma = noise_scale(3.0, 1.0, 0.01, 100)
    assert 3.0 * 1.02 < sigma < 3.0 * 1.0201 and noise_scale(3.0, 0.0, 0.01, 100) == 0.0


def test_a_matrix_has_the_same_noise_in_every_direction_of_the_frobenius_norm():
    draws = np.array([release_symmetric(np.zeros((3, 3)), 2.0, b"%d" % k) for k in range(1500)])
    np.testing.assert_array_equal(draws, np.swapaxes(draws, 1, 2))
    sd = draws.std(0)
    np.testing.assert_allclose(np.diag(sd), 2.0, rtol=0.09)
    np.testing.assert_allclose(sd[np.triu_indices(3, 1)], 2.0 / np.sqrt(2), rtol=0.09)


def test_the_noise_costs_what_was_granted():
    alpha, cost = 7.0, 0.03
    assert alpha / (2 * noise_multiplier(alpha, cost) ** 2) == pytest.approx(cost)
