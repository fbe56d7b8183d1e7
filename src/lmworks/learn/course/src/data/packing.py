"""Documents of different length into rows of one length, with as little padding as possible."""

from __future__ import annotations

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def pack(lengths: list[int], size: int) -> list[list[int]]:
    """Which documents (their places in `lengths`) each row of `size` tokens has. None is longer than a row."""
    # exercise pack(lengths, size)
    rows: list[list[int]] = []
    room: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fits = [row for row in range(len(rows)) if room[row] >= lengths[document]]
        if fits:
            row = min(fits, key=lambda row: room[row])
        else:
            row = len(rows)
            rows.append([])
            room.append(size)
        rows[row].append(document)
        room[row] -= lengths[document]
    return rows
    # end pack
