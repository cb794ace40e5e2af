"""Language models by name, and numbers in people's units."""

import pytest

import gradwire
from gradwire.plan.language import by_language_model, language_sizes
from gradwire.plan.machine import MACHINES
from gradwire.plan.network import FASTEST
from gradwire.plan.rate import parse_rate, parse_time, show_rate
from gradwire.plan.show import show_bytes, show_count, show_number, show_seconds

PUBLISHED = {
    "gpt2": 124_439_808,
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "7b": 6_738_415_616,
    "8b": 8_030_261_248,
    "13b": 13_015_864_320,
    "70b": 70_553_706_496,
}


def test_sizes_are_the_published_ones():
    assert language_sizes() == PUBLISHED


def test_a_step_takes_six_flop_for_each_parameter_and_token():
    load = by_language_model("7B", MACHINES["h100"], 4, None)
    assert load.entries == PUBLISHED["7b"]
    assert load.seconds == pytest.approx(6 * PUBLISHED["7b"] * 4 * 2048 / (0.4 * 989e12))
    assert not load.measured
    assert by_language_model("resnet50", MACHINES["h100"], 4, None) is None
    found = gradwire.plan("7B", workers=8, gpu="h100", link="10Gbps")
    assert "4 sequences" not in found.notes[0]
    assert "8 sequences of 2,048 tokens per worker" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "gbits"),
    [
        *(("10Gbps", 10), ("10 Gbit/s", 10), ("10gbit", 10), ("1.6Tbps", 1600)),
        *(("NVLink", 2400), ("nvlink4", 3600), ("NVLink 4", 3600), ("nvlink5", 7200)),
        *(("PCIe4", 252), ("PCIe Gen4 x16", 252), ("pcie5", 504), ("25 GB/s", 200)),
    ],
)
def test_rates_as_people_write_them(text, gbits):
    assert parse_rate(text, FASTEST) == gbits * 10**9


def test_times_with_a_space():
    assert parse_time("5 ms") == parse_time("5ms") == 0.005


def test_numbers_have_three_digits_and_no_exponent():
    shown = [show_number(x) for x in (0, 0.0123, 0.5, 1, 1.234, 9.999, 12.34, 99.96, 1234.5)]
    assert shown == ["0", "0.012", "0.5", "1", "1.23", "10", "12.3", "100", "1,234"]
    seconds = [show_seconds(x) for x in (2.41, 0.0353, 8.4e-5, 19.2, 2080)]
    assert seconds == ["2.41 s", "35.3 ms", "84 us", "19.2 s", "2,080 s (34.7 min)"]
    assert [show_bytes(x) for x in (28e9, 1.5e6, 999.9e6, 416)] == [
        "28 GB",
        "1.5 MB",
        "1 GB",
        "416 bytes",
    ]
    counts = [show_count(n) for n in (7 * 10**9, 25_557_032, 2048)]
    assert counts == ["7 billion", "25.6 million", "2,048"]
    rates = [show_rate(x) for x in (3200e9, 999.9e6, 83.7e3)]
    assert rates == ["3.2 Tbit/s", "1 Gbit/s", "83.7 kbit/s"]
