import numpy as np
import pytest
from scipy import stats

from fedpdmc.privacy.accountant import gaussian_renyi
from fedpdmc.privacy.mechanism import noise_multiplier, normals, release, release_symmetric


def test_noise_is_normal_and_new_for_every_key():
    one, other = normals(b"key", 20001), normals(b"yek", 20001)
    for z in (one, other):
        assert len(z) == 20001 and stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(20001)
    np.testing.assert_array_equal(one, normals(b"key", 20001))


def test_a_release_has_the_noise_it_says_and_no_bits_below_it():
    values = np.linspace(-3, 3, 20000)
    noise = release(values, 0.5, b"key") - values
    assert stats.kstest(noise / 0.5, "norm").pvalue > 1e-3
    # Half the noise would be seen.
    assert stats.kstest(noise / 0.25, "norm").pvalue < 1e-6
    grid = release(values, 0.5, b"key") * 2.0**21
    np.testing.assert_array_equal(grid, np.round(grid))
    np.testing.assert_array_equal(release(values, 0.0, b"key"), values)


def test_a_matrix_has_the_same_noise_in_every_direction_of_the_frobenius_norm():
    draws = np.array([release_symmetric(np.zeros((3, 3)), 2.0, b"%d" % k) for k in range(4000)])
    np.testing.assert_array_equal(draws, np.swapaxes(draws, 1, 2))
    sd = draws.std(0)
    np.testing.assert_allclose(np.diag(sd), 2.0, rtol=0.06)
    np.testing.assert_allclose(sd[np.triu_indices(3, 1)], 2.0 / np.sqrt(2), rtol=0.06)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_noise_costs_what_was_granted(parts):
    alpha, cost = 7.0, 0.03
    multiplier = noise_multiplier(alpha, cost, parts)
    assert parts * gaussian_renyi(alpha, 1.0, multiplier) == pytest.approx(cost)
