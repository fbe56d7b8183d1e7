"""The catalogue of accelerators: sourced, recognised by whole names, open to the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.spec import Cluster, SpecError, catalogue, parse_cluster, recognise


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


def test_every_entry_says_what_joins_it_and_how_to_type_it() -> None:
    short = [name for gpu in catalogue().values() for name in gpu.alias.split()]
    assert len(short) == len(set(short)), "two accelerators have one short name"
    for name, gpu in catalogue().items():
        assert gpu.alias, f"{name} has no short name"
        for text in (name, name.lower(), *gpu.alias.split()):
            assert parse_cluster(f"1x{text}").gpu == name
    assert catalogue()["H100-SXM-80GB"].fabric == "nvswitch" and catalogue()["L40S"].fabric == "pcie"
    assert catalogue()["GB200"].domain == 72 and catalogue()["TPU v5p"].fabric == "torus"
    assert catalogue()["A100-SXM-80GB"].nic_gbs == 25 and catalogue()["H100-SXM-80GB"].nic_gbs == 50


@pytest.mark.parametrize(
    ("text", "gpu", "nodes", "per_node"),
    [
        ("256xh100", "H100-SXM-80GB", 32, 8),
        ("8xH100", "H100-SXM-80GB", 1, 8),
        (" 1x h200 ", "H200-SXM-141GB", 1, 1),
        ("h100", "H100-SXM-80GB", 1, 1),
        ("2x8xh100", "H100-SXM-80GB", 2, 8),
        ("16*a100-40", "A100-SXM-40GB", 2, 8),
        ("3x4xa100", "A100-SXM-80GB", 3, 4),
        ("4xb200", "B200-SXM", 1, 4),
        ("72xgb200", "GB200", 18, 4),
        ("64xtpu v5p", "TPU v5p", 16, 4),
    ],
)
def test_a_cluster_as_people_write_it(text: str, gpu: str, nodes: int, per_node: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.gpu, cluster.nodes, cluster.gpus_per_node) == (gpu, nodes, per_node)
    assert cluster.gpus == nodes * per_node


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12xh100", r"12 do not fill machines of 8; 8xh100 or 16xh100 would, and 3x4xh100 are smaller machines"),
        ("-4xh100", r"-4 is not a count; it must be a whole number, at least 1"),
        ("0xh100", r"0 is not a count"),
        ("2x0xh100", r"0 is not a count"),
        ("1.5xh100", r"1.5 is not a count"),
        ("8xh10", r"'h10' is not in the catalogue of accelerators; did you mean 'h100'"),
        ("8xabacus", r"known: .*h100"),
        ("h100x256", r"cluster 'h100x256': counts come first; did you mean '256xh100'\?"),
        ("H100 x 8", r"did you mean '8xH100'\?"),
        ("a100:2x8", r"did you mean '2x8xa100'\?"),
        ("h10x8", r"'h10x8' is not in the catalogue of accelerators; did you mean 'h100'"),
        ("8", r"write COUNTxGPU, e.g. 8xh100"),
        ("", r"write COUNTxGPU"),
    ],
)
def test_a_cluster_that_is_none_says_what_would_be(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_cluster(text)


def test_a_cluster_of_your_own(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[MyChip]\nper_node = 6\nnic_gbs = 3\n")
    cluster = parse_cluster("12xmychip", str(own))
    assert (cluster.nodes, cluster.gpus_per_node, cluster.catalogue) == (2, 6, str(own))
    with pytest.raises(SpecError, match=r"gpu.fabric = 'string' is not one of: nvswitch"):
        own.write_text('[MyChip]\nfabric = "string"\n')
        catalogue.cache_clear()
        parse_cluster("12xmychip", str(own))


def test_a_profile_is_named_and_read_only_by_who_plans_with_it() -> None:
    assert Cluster().profile == ""
    assert Cluster.from_dict({"profile": "not-here.toml"}).profile == "not-here.toml"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("profile", 3, "cluster.profile must be a string, got 3"),
        ("fabric", "rope", "cluster.fabric = 'rope' is not one of: auto, nvswitch"),
        ("network", "pigeon", "cluster.network = 'pigeon' is not one of: infiniband"),
        ("nic_gbs", -1.0, "cluster.nic_gbs = -1.0 is out of range"),
        ("price_hour", -1.0, "cluster.price_hour = -1.0 is out of range"),
        ("domain", -8, "cluster.domain = -8 is out of range"),
    ],
)
def test_what_joins_a_cluster_is_checked(key: str, value: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Cluster.from_dict({key: value})


def test_a_spec_may_use_a_short_name() -> None:
    assert Cluster(gpu="h100").gpu == "H100-SXM-80GB"
    assert Cluster(gpu="a100 sxm 80gb").accelerator == catalogue()["A100-SXM-80GB"]
