"""A distribution exports the same as the client library's histogram."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tidegate.telemetry.distribution import Distribution

BUCKETS = (0.005, 1, 2.5, 86_400)


@given(st.lists(st.floats(0, 1e6) | st.sampled_from(BUCKETS), max_size=30))
def test_the_text_is_that_of_a_histogram(values: list[float]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("a_seconds", "What it is.", ["source"], registry=theirs, buckets=BUCKETS)
    distribution = Distribution("a_seconds", "What it is.", "source", registry=ours, buckets=BUCKETS)
    for value in values:
        histogram.labels("shop").observe(value)
    distribution.observe("shop", values[:3])
    distribution.observe("shop", values[3:])
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    found = generate_latest(ours).decode().splitlines()
    if values:
        assert found[:-1] == expected[:-1]
        assert math.isclose(float(found[-1].split()[-1]), float(expected[-1].split()[-1]))
    else:
        assert {line.split()[-1] for line in found[2:]} == {"0.0"}
