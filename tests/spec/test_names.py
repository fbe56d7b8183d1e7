"""Names from outside that lead nowhere but to a file of the same folder."""

from __future__ import annotations

import pytest

from lmworks.spec.files import unsafe_name


@pytest.mark.parametrize(
    "name",
    [
        "../x", "..", ".", "", "/etc/passwd", "a/b", "a/../../b", "..\\x", "\\\\host\\share", "C:x", "c:\\x", "a\0b",
        "a\nb", "\ud800", "x" * 256, "ü" * 128, None, 7, ["x"], b"x",
    ],
)  # fmt: skip
def test_what_is_not_the_plain_name_of_a_file_is_refused(name: object) -> None:
    why = unsafe_name(name)
    assert why.startswith("it ") and "\n" not in why


@pytest.mark.parametrize(
    "name",
    [
        "rank-00000.safetensors",
        "index.json",
        "model-00001-of-00030.safetensors",
        "train-00000",
        "a b",
        "ü",
        "..x",
        "x..",
    ],
)
def test_what_is_may_be_used(name: str) -> None:
    assert unsafe_name(name) == ""
