"""Tests of the export of what adapters were used for, over metrics that are only written down."""

import collections
import threading

import pytest

from deployments.adapter_metrics import AdapterMetrics, AdapterReading, RayMetrics
from models.adapters.meter import OTHER_ADAPTERS, AdapterMeter


class Written:
    """Metrics as Ray would hold them: (name, tags) -> value."""

    def __init__(self):
        self.counters = collections.Counter()
        self.gauges = {}
        self.is_written = threading.Event()

    def add(self, name, description, value, tags):
        assert value > 0
        assert description
        self.counters[name, *sorted(tags.items())] += value

    def set(self, name, description, value, tags):
        assert description
        self.gauges[name, *sorted(tags.items())] = value
        self.is_written.set()


@pytest.fixture
def meter():
    return AdapterMeter(2)


@pytest.fixture
def written():
    return Written()


def make_metrics(meter, written, **options):
    def read():
        return AdapterReading(totals=meter.totals(), host_bytes=123, num_resident=4)

    return AdapterMetrics("base", read, written, **options)


def counter(name, adapter_id):
    return (name, ("adapter", adapter_id), ("model", "base"))


def test_what_was_added_since_the_last_time_is_exported_once(meter, written):
    metrics = make_metrics(meter, written)
    meter.count_load("a", 1.5)
    for _ in range(3):
        meter.count_request("a")
    metrics.update()
    metrics.update()
    meter.count_request("a")
    meter.count_tokens("a", 7)
    metrics.update()

    assert written.counters == {
        counter("medley_adapter_loads", "a"): 1,
        counter("medley_adapter_load_seconds", "a"): 1.5,
        counter("medley_adapter_requests", "a"): 4,
        counter("medley_adapter_generated_tokens", "a"): 7,
    }
    assert written.gauges == {
        ("medley_adapter_host_bytes", ("model", "base")): 123,
        ("medley_adapters_resident", ("model", "base")): 4,
    }


def test_the_number_of_tags_is_bounded_whatever_is_asked_for(meter, written):
    metrics = make_metrics(meter, written)
    for index in range(10_000):
        meter.count_request(f"a{index}")
        if index % 1000 == 0:
            metrics.update()
    metrics.update()

    assert written.counters == {
        counter("medley_adapter_requests", "a0"): 1,
        counter("medley_adapter_requests", "a1"): 1,
        counter("medley_adapter_requests", OTHER_ADAPTERS): 9998,
    }


def test_the_thread_exports_and_its_end_exports_once_more(meter, written):
    metrics = make_metrics(meter, written, period_s=0.01)
    metrics.start()
    assert written.is_written.wait(20)
    slow = make_metrics(meter, written, period_s=1000.0)
    slow.start()
    meter.count_request("a")

    metrics.stop()
    slow.stop()
    metrics._thread.join(20)
    slow._thread.join(20)

    assert not metrics._thread.is_alive()
    assert written.counters[counter("medley_adapter_requests", "a")] == 2


def test_metrics_that_fail_end_nothing(meter, written):
    metrics = make_metrics(meter, written, period_s=0.01)
    is_failing = [True]
    add = written.set

    def fail(*values):
        if is_failing.pop() if is_failing else False:
            raise RuntimeError
        add(*values)

    written.set = fail
    metrics.start()

    assert written.is_written.wait(20)
    metrics.stop()


def test_metrics_that_were_never_started_can_be_stopped(meter, written):
    make_metrics(meter, written).stop()


def test_rays_metrics_take_the_names_and_tags():
    metrics = RayMetrics()

    metrics.add("medley_adapter_loads", "Loads.", 1.0, {"model": "m", "adapter": "org/a"})
    metrics.add("medley_adapter_loads", "Loads.", 2, {"model": "m", "adapter": OTHER_ADAPTERS})
    metrics.set("medley_adapters_resident", "Resident.", 3, {"model": "m"})

    assert metrics._counters["medley_adapter_loads"].info["tag_keys"] == ("model", "adapter")
