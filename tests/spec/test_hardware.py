"""The catalogue of accelerators: sourced, recognised by whole names, open to the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.spec import Cluster, SpecError, catalogue, recognise


def test_every_entry_has_a_source_and_figures() -> None:
    gpus = catalogue()
    assert len(gpus) > 30
    for name, gpu in gpus.items():
        assert gpu.name == name
        assert gpu.source, f"{name} has no source"
        assert gpu.memory_gb or gpu.bf16_tflops, f"{name} has no figures"


def test_peaks() -> None:
    h100 = catalogue()["H100-SXM-80GB"]
    assert h100.peak_flops("bf16") == pytest.approx(989e12, rel=1e-3)
    assert catalogue()["T4"].peak_flops("bf16") is None  # unknown is not zero


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA B200", "B200-SXM"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_recognise(driver: str, name: str) -> None:
    gpu = recognise(driver)
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize(
    "driver",
    [
        "",
        "NVIDIA L40",  # not an L4
        "NVIDIA A100-SXM-64GB",  # not an A10
        "NVIDIA RTX A3000",  # not an A30
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H200 NVL",
    ],
)
def test_a_card_that_only_resembles_another_stays_unknown(driver: str) -> None:
    assert recognise(driver) is None


def test_your_own(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[MyChip]\nmatch = "Chip 9000"\nbf16_tflops = 7\nsource = "me"\n[L4]\nbf16_tflops = 100\n')
    cluster = Cluster(gpu="MyChip", catalogue=str(own))
    assert cluster.accelerator is not None and cluster.accelerator.peak_flops("bf16") == 7e12
    assert catalogue(str(own))["L4"].bf16_tflops == 100  # theirs wins
    assert catalogue()["L4"].bf16_tflops == 121
    found = recognise("Chip 9000", str(own))
    assert found is not None and found.name == "MyChip"
    assert recognise("Chip 9000") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[X]\nbf16_tflop = 7", r"own.toml, \[X\]: unknown key 'gpu.bf16_tflop'; did you mean 'bf16_tflops'\?"),
        ("[X]\nbf16_tflops = -7", r"own.toml, \[X\]: gpu.bf16_tflops = -7.0 is out of range: it must be at least 0"),
        ("X = 3", r"own.toml, \[X\]: gpu: expected a table, got 3"),
        ("[X", "own.toml is not valid TOML"),
        (None, "cannot read .*own.toml: No such file or directory"),
    ],
)
def test_a_bad_catalogue_names_its_entry(tmp_path: Path, text: str | None, message: str) -> None:
    own = tmp_path / "own.toml"
    if text is not None:
        own.write_text(text)
    with pytest.raises(SpecError, match=f"cluster.catalogue: .*{message}" if text else message):
        Cluster(catalogue=str(own))
