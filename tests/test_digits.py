"""Numbers in names and options are those of ASCII: \\d and str.isdecimal also know those of other scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmworks.bench.workload import read_prefix, read_range
from lmworks.checkpoint.format.folders import LEFTOVER, folders
from lmworks.cli.options import parse_bytes
from lmworks.data.tokenizer import bpe_size
from lmworks.launch.slurm import TIME
from lmworks.model.hf_write import WEIGHTS
from lmworks.plan.devices.profile import ProfileError, read_links
from lmworks.plan.software import SOFTWARE
from lmworks.plan.tables.columns import Row
from lmworks.plan.tables.rows import recompute_of
from lmworks.record.hang import attempts
from lmworks.spec import LMWorksError, SpecError
from lmworks.spec.hardware import parse_cluster

ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


def elsewhere(text: str) -> str:
    return text.translate(ARABIC)


@pytest.mark.parametrize(
    ("read", "text", "refused"),
    [
        (parse_cluster, "8xh100", "write COUNTxGPU"),
        (parse_cluster, "2x8xh100", "write COUNTxGPU"),
        (lambda text: parse_bytes(text, "--bytes"), "5GB", "is not a size; write it like 5GB"),
        (bpe_size, "bpe:4096", "write bpe:N"),
        (read_prefix, "512x4", "write TOKENS, e.g. 512"),
        (lambda text: read_range(text, "--input"), "100:1024", "write LOW:HIGH"),
    ],
)
def test_options(read: Callable[[str], object], text: str, refused: str) -> None:
    read(text)
    with pytest.raises(LMWorksError, match=refused):
        read(elsewhere(text))


def test_what_is_handed_to_others() -> None:
    """Slurm knows no other digits; and what no export of ours has written is not removed by the next."""
    for pattern, name in (
        (TIME, "1-12:00:00"),
        (WEIGHTS, "model-00001-of-00002.safetensors"),
        (LEFTOVER, ".step-000100.tmp-17-1"),
    ):
        assert pattern.fullmatch(name)
        assert not pattern.fullmatch(elsewhere(name))


def test_a_folder_named_otherwise_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("step-000100", elsewhere("step-000100"), elsewhere("step-000200")):
        (tmp_path / name).mkdir()
    assert [path.name for path in folders(tmp_path)] == ["step-000100"]


def test_nor_one_of_an_attempt(tmp_path: Path) -> None:
    for name in ("attempt-1", elsewhere("attempt-1"), "attempt-²", "attempt-2.old"):
        (tmp_path / "hangs" / name).mkdir(parents=True)
    assert attempts(tmp_path) == {1: tmp_path / "hangs" / "attempt-1"}


def test_a_profile_counts_ranks() -> None:
    known = {"gpus": 2, "link_gbs": 1.0, "fabric": "nvlink", "sizes": [1.0, 2.0]}
    assert read_links("links", {**known, "all-reduce": {"2": [1.0, 2.0]}})["all-reduce"] == {"2": [1.0, 2.0]}
    with pytest.raises(ProfileError, match="'٢' is no number of ranks"):
        read_links("links", {**known, "all-reduce": {"٢": [1.0, 2.0]}})


def test_an_exponent_is_no_count_of_layers() -> None:
    software = SOFTWARE["torchtitan"]
    assert recompute_of(Row({"recompute": "2"}), software) == "full"
    with pytest.raises(SpecError, match="recompute = '²' is not known"):
        recompute_of(Row({"recompute": "²"}), software)
