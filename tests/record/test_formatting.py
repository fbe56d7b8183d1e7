"""Figures for people: rounded where a digit rolls over into the next unit."""

import pytest

from lmworks.record.formatting import binary_bytes, clock, duration, short


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.5, "0.5"),
        (999.4, "999"),
        (1000, "1k"),
        (12_345, "12.3k"),
        (999_700, "1M"),
        (2e15, "2P"),
    ],
)
def test_short(number, text):
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90_061, "1d 01:01:01")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5e-5, "25 µs"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (12.34, "12.3 s"), (4000, "4000 s")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (999.5 * 1024, "1000 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (2**30 - 1, "1 GiB"),
        (300 * 2**40, "300 TiB"),
    ],
)
def test_binary_bytes(count, text):
    assert binary_bytes(count) == text
