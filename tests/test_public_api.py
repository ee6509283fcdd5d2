import subprocess
import sys

import pytest

import fedpdmc as fp

PROMISED = {
    "Boomerang", "BouncyParticle", "FactorisedBoomerang", "Redistributed", "Reference", "Site", "ZigZag", "laplace", "load",
    "models", "sample",
}  # fmt: skip
MODELS = {
    "ar1_student_t", "gaussian_mean", "grid_prior", "linear", "log_gaussian_cox", "logistic", "normal_prior", "poisson",
    "student_t", "from_logdensity", "from_numpyro",
}  # fmt: skip


def test_the_promised_names_are_there_and_at_most_twenty():
    assert set(fp.__all__) >= PROMISED
    assert len(set(fp.__all__) - {"__version__"}) <= 20
    assert all(hasattr(fp, name) for name in fp.__all__)
    assert set(dir(fp)) == set(fp.__all__)


def test_every_model_is_there():
    assert all(callable(getattr(fp.models, name)) for name in MODELS)


def test_every_public_name_says_what_it_is():
    for name in set(fp.__all__) - {"__version__"}:
        assert getattr(fp, name).__doc__, name


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'smaple'"):
        _ = fp.smaple


# What only an extra installs.
OPTIONAL = ("blackjax", "cryptography", "dp_accounting", "flwr", "grpc", "numpyro", "psycopg")


def test_import_does_not_import_jax_and_every_name_needs_no_extra():
    code = f"""
import sys
sys.modules |= dict.fromkeys({OPTIONAL})
import fedpdmc
assert "jax" not in sys.modules
# Half a second, which a run does not need.
fedpdmc.sample, fedpdmc.Site, fedpdmc.models.weibull
assert "scipy.stats" not in sys.modules
for name in fedpdmc.__all__:
    getattr(fedpdmc, name)
assert "jax" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_starts_no_device():
    """A program may set JAX up, or fork, after its imports. Other packages' samplers do as they like."""
    code = """
import importlib, pkgutil, fedpdmc
from jax._src import xla_bridge
for module in pkgutil.walk_packages(fedpdmc.__path__, "fedpdmc."):
    if not any(word in module.name for word in ("__main__", "pooled_nuts", ".flower")):
        importlib.import_module(module.name)
        assert not xla_bridge._backends, module.name
"""
    subprocess.run([sys.executable, "-c", code], check=True)
