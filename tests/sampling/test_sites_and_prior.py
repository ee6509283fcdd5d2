"""Sites and priors that fit together, and what is said where they do not."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import hospitals, logistic_site, prior

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.sampling.arguments import check_prior, check_sites, problem_dim, resolve_members


def quartic(x, data):
    return jnp.sum(data) * jnp.sum(x**4)


def unsized(name="own"):
    return fp.Site(quartic, data=np.ones(3), name=name)


def test_one_site_is_a_list_of_one():
    site = logistic_site("north")
    assert check_sites(site) == (site,)


@pytest.mark.parametrize(
    ("sites", "found"),
    [
        (3, "int"),
        ([], "no sites"),
        ([logistic_site("a"), "b"], "a str"),
        ([logistic_site("a"), logistic_site("a")], "several sites named 'a'"),
    ],
)
def test_what_is_no_federation_is_refused(sites, found):
    with pytest.raises(InputError) as error:
        check_sites(sites)
    assert (error.value.argument, error.value.found) == ("sites", found)


def test_a_prior_is_gaussian_none_or_redistributed():
    assert check_prior(None) is None
    assert check_prior(prior()) is not None and check_prior(fp.Redistributed(prior())) is not None
    for wrong in ("flat", fp.models.gaussian_mean(np.ones((2, 2)))):
        with pytest.raises(InputError, match="^prior: found"):
            check_prior(wrong)


def test_the_number_of_parameters_comes_from_whoever_says_it():
    for options in ({"prior": prior()}, {"prior": None, "init": [0.0, 0.0]}, {"prior": None, "names": ["a", "b"]}):
        members, _, dim = resolve_members([unsized()], **options)
        assert dim == members[0].dim == 2
    assert resolve_members([unsized(), logistic_site("north")], None)[2] == 2
    with pytest.raises(InputError, match="own"):
        resolve_members([unsized()], None)


def test_a_prior_that_is_a_function_is_a_site():
    members, found, dim = resolve_members(hospitals(), lambda x: jnp.sum(x**2))
    assert [site.name for site in members] == ["north", "south", "prior"] and found is None and dim == 2
    with pytest.raises(InputError, match="a site named 'prior'"):
        resolve_members([logistic_site("prior")], lambda x: jnp.sum(x**2))


def test_coordinates_and_models_agree_on_the_parameters():
    apart = [logistic_site("a", coordinates=[0, 1]), logistic_site("b", coordinates=[2, 4])]
    assert problem_dim(apart, None) == 5
    assert resolve_members(apart, fp.models.normal_prior(5))[2] == 5
    with pytest.raises(InputError, match="no site that sees coordinate 3"):
        resolve_members(apart, None)
    with pytest.raises(InputError, match="Give indices below 4"):
        resolve_members(apart, fp.models.normal_prior(4))
    with pytest.raises(InputError, match="a model of 2 parameters where the federation has 3"):
        resolve_members(hospitals(), fp.models.normal_prior(3))


def test_sites_with_one_function_are_padded_alike_unless_that_is_a_burden():
    def own(n, name):
        return fp.Site(quartic, data=np.ones(n), name=name)

    alike, _, _ = resolve_members([own(3, "a"), own(20, "b")], prior())
    sizes = {site.potential.function.size for site in alike if hasattr(site.potential.function, "size")}
    assert len(sizes) <= 1 and [site.records for site in alike] == [3, 20]
