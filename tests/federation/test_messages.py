"""The codec: what is encoded comes back to the bit, and no bytes do anything but decode or be refused."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federation.kinds import DIGEST, RUN, arrays, messages

from fedpdmc.errors import BadAnswer, WireError
from fedpdmc.federation import answer_checks
from fedpdmc.federation import messages as wire


@pytest.mark.parametrize("message", messages(), ids=lambda m: type(m).__name__)
def test_a_message_comes_back_to_the_bit(message):
    data = wire.encode(message)
    back = wire.decode(data)
    assert type(back) is type(message)
    for field in dataclasses.fields(message):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(message, field.name))
    assert wire.encode(back) == data


@pytest.mark.parametrize("version", wire.READABLE)
@pytest.mark.parametrize("message", messages(), ids=lambda m: type(m).__name__)
def test_a_message_of_an_earlier_version_is_read_and_written(message, version):
    """Without the fields that were added later, which have their defaults."""
    added = [field for field in dataclasses.fields(message) if field.metadata.get("since", 0) > version]
    plain = dataclasses.replace(message, **{field.name: field.default_factory() for field in added})
    data = wire.encode(plain, version)
    assert wire.version_of(data) == version and len(data) <= len(wire.encode(plain))
    back = wire.decode(data)
    for field in dataclasses.fields(message):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(plain, field.name))
    for field in added:
        if not np.array_equal(getattr(message, field.name), field.default_factory()):
            with pytest.raises(WireError, match=f"wire version {version} does not have"):
                wire.encode(message, version)


def test_the_present_version_is_read_and_the_one_before_it():
    assert {wire.VERSION - 1, wire.VERSION} <= set(wire.READABLE)
    assert any(field.metadata.get("since") == wire.VERSION for field in dataclasses.fields(wire.Open))
    other = bytearray(wire.encode(messages()[0]))
    other[4] = wire.VERSION + 1
    with pytest.raises(wire.OtherVersion, match=f"wire version {wire.VERSION + 1}.*reads"):
        wire.decode(bytes(other))


@pytest.mark.parametrize("message", messages(), ids=lambda m: type(m).__name__)
def test_every_truncation_and_every_extension_is_refused(message):
    data = wire.encode(message)
    for size in range(len(data)):
        with pytest.raises(WireError):
            wire.decode(data[:size])
    with pytest.raises(WireError, match="after its end"):
        wire.decode(data + b"\0")


def decodes_or_refuses(data):
    try:
        message = wire.decode(data)
    except WireError:
        return
    assert wire.encode(message, wire.version_of(data)) == data


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_any_bytes_decode_or_are_refused(data):
    decodes_or_refuses(data)
    for kind in wire.KINDS:
        decodes_or_refuses(wire.HEADER.pack(wire.MAGIC, wire.VERSION, kind) + data)


@given(st.sampled_from(messages()), st.data())
@settings(max_examples=500)
def test_altered_messages_decode_or_are_refused(message, data):
    raw = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(raw))


@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2**31, 2**31, 4), (0, 2**32 - 1, 2**32 - 1)])
def test_a_claimed_size_allocates_nothing(shape):
    plans = wire.LAYOUTS[wire.VERSION, wire.Plans.kind]
    heads = [wire.MAGIC, wire.VERSION, wire.Plans.kind, RUN, 1, 0, 0, 0, 0, 0, *shape, 0, 0, 0.0, 0]
    data = plans.head.pack(*heads, plans.padding)
    tracemalloc.start()
    with pytest.raises(WireError):
        wire.decode(data)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_a_message_above_the_limit_is_refused_whatever_it_holds():
    with pytest.raises(WireError, match="the maximum is 1000"):
        wire.decode(bytes(1001), 1000)


def turning(**changes):
    """Two plans that the site makes for itself."""
    rows = (np.arange(2),) * 3
    made = wire.TurnPlans(RUN, 1, *rows, arrays(2, 2), arrays(2, 2), np.full(2, 0.5), np.ones(2), DIGEST)
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (wire.Hello("nor\ufe0fth", DIGEST, "fedpdmc 0", DIGEST), "site"),
        (wire.Hello("nor\u202eth", DIGEST, "fedpdmc 0", DIGEST), "site"),
        (wire.Derive(RUN, 1, np.array([0.0, np.nan])), "x"),
        (wire.Derivatives(RUN, 1, DIGEST, np.inf, arrays(2), arrays(2, 2)), "value"),
        (wire.Derivatives(RUN, 1, DIGEST, 0.0, arrays(2), arrays(2, 3)), "hessian"),
        (
            wire.Plans(RUN, 1, np.array([-1]), arrays(1, 2), np.ones((1, 1)), arrays(1, 1, 2), np.zeros(1, int)),
            "number",
        ),
        (turning(time=np.zeros(3)), "time"),
        (
            wire.Plans(RUN, 1, np.array([1]), arrays(1, 2), -np.ones((1, 1)), arrays(1, 1, 2), np.zeros(1, int)),
            "duration",
        ),
        (
            wire.Plans(RUN, 1, np.array([1]), arrays(1, 2), np.ones((1, 2)), arrays(1, 1, 2), np.zeros(1, int)),
            "velocity",
        ),
        (wire.Plans(RUN, 1, np.arange(2), arrays(2, 2), np.ones((2, 1)), arrays(2, 1, 2), np.ones(2, int)), "chain"),
        (wire.Arrivals(RUN, 1, DIGEST, np.ones(2), np.ones(2, bool), np.zeros(1, int), np.zeros((1, 2))), "mark"),
        (wire.Arrivals(RUN, 1, DIGEST, -np.ones(1), np.ones(1, bool), np.zeros(1, int), np.zeros((0, 2))), "time"),
        (
            wire.Arrivals(RUN, 1, DIGEST, np.ones(1), np.ones(1, bool), np.zeros(1, int), np.zeros((0, 2)), 1.0, -1.0),
            "account",
        ),
        (wire.Arrivals(RUN, 1, DIGEST, np.ones(1), np.ones(2, bool), np.zeros(1, int), np.zeros((0, 2))), "rang"),
        (wire.Opened(RUN, 1, DIGEST, 1.0, -np.ones(14)), "account"),
        (turning(wait=np.array([0.0, 1.0])), "wait"),
        (turning(wait=np.array([0.1, 1.6])), "wait"),
        (turning(left=-np.ones(2)), "left"),
        (turning(chain=np.ones(2, int)), "chain"),
        (turning(velocity=np.ones((2, 3))), "plan"),
        (turning(turn=np.ones(1, int)), "plan"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(message, field):
    with pytest.raises(WireError) as error:
        wire.decode(wire.encode(message))
    assert error.value.field == field


def test_another_version_is_refused():
    data = bytearray(wire.encode(wire.Farewell(RUN, 1)))
    data[4] = 1
    with pytest.raises(WireError, match="wire version 1; this software reads"):
        wire.decode(bytes(data))


def test_padding_that_is_not_zero_is_refused():
    data = bytearray(wire.encode(wire.Farewell(RUN, 1)))
    assert len(data) == 32
    data[-1] = 1
    with pytest.raises(WireError, match="padding after the header"):
        wire.decode(bytes(data))


def test_an_account_that_cannot_be_is_a_bad_answer():
    """An order of one, with which the coordinator would divide by zero."""
    numbers = [1, 1e-5, 1, 0, 0, 40, 0.2, 0.1, 0.4, 0.2, 3, 1, 0.5, 0]
    with pytest.raises(BadAnswer, match="order 1"):
        answer_checks.read_account("north", 2, 3.5, numbers)
