"""Numbers as people read them. Programs get the numbers themselves (`--json`)."""

from __future__ import annotations


def short(number: float) -> str:
    """1234567 as 1.23M: three digits are all that fits in a glance."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or unit == "T":
            break
        number /= 1000
    digits = 0 if abs(number) >= 99.95 or (not unit and number == int(number)) else 1 if abs(number) >= 9.995 else 2
    return f"{number:.{digits}f}{unit}"


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
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= 0.9995 * scale), (1e-6, "µs")
    )
    return f"{seconds / scale:.3g} {unit}"


def binary_bytes(count: float) -> str:
    """Bytes in powers of 1024, as memory is sold: 3 GiB = 3 × 2**30."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1023.5 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.95 else f"{count:.3g} {unit}"
