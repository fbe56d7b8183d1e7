"""Numbers as people read them. Programs get the numbers themselves (`--json`)."""

from __future__ import annotations


def short(number: float) -> str:
    """1234567 as 1.23M: three digits are all that fits in a glance."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}E"


def clock(seconds: float) -> str:
    """75 as 1:15, 90061 as 1d 01:01:01."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def duration(seconds: float) -> str:
    """A measured time, in the unit that fits: 0.0123 as 12.3 ms."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    if seconds >= 0.9995 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def binary_bytes(count: float) -> str:
    """Bytes in powers of 1024, as memory is sold: 3 GiB = 3 × 2**30."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.5:
            return f"{count:.0f} {unit}" if abs(count) >= 999.5 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
