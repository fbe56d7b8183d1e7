"""The reference configurations: their size, their memory by hand and by the exact sheet, and a published run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.plan.case import Case
from lmworks.plan.memory.rank_weights import resident
from lmworks.plan.memory.reserve import safe_bytes
from lmworks.plan.memory.sheet import run_budget
from lmworks.plan.software import SOFTWARE
from lmworks.plan.step.constants import constants
from lmworks.plan.step.price import price
from lmworks.spec import load_run

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "reference").glob("*.toml"))
SIZES = {"7b": (7e9, 8e9), "70b": (70e9, 71e9), "405b": (400e9, 410e9), "moe-1t": (0.9e12, 1.1e12)}
# The Llama 3 Herd of Models (2024), table 4: 405B, TP 8, PP 16, sequences of 8,192, 16 M tokens a step, H100s.
LLAMA_3 = [(64, 0.43), (128, 0.41)]  # data-parallel ranks, MFU


def test_every_size_on_every_gpu() -> None:
    wanted = {"7b-8", *(f"70b-{n}" for n in (64, 128, 256)), *(f"405b-{n}" for n in (512, 1024, 2048)), "moe-1t-4096"}
    assert {path.stem for path in CONFIGS} == {f"{name}-{gpu}" for name in wanted for gpu in ("a100", "h100", "b200")}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_size_and_weights_by_hand(path: Path) -> None:
    """4 bytes a parameter, over tensor and pipeline ranks, and with FSDP over all that shard; stages are not equal."""
    spec = load_run(path)
    size, gpus, _ = path.stem.rsplit("-", 2)
    low, high = SIZES[size]
    layout = spec.parallel
    assert low < spec.model.params < high
    assert layout.world == spec.cluster.gpus == int(gpus)
    if layout.offload == "full":
        assert resident(spec, 0).parameters == 0
        return
    m = spec.model
    experts = m.layers * m.experts * 3 * m.hidden * m.expert_ffn if m.experts else 0
    ends = m.vocab * m.hidden * (1 if m.tie_embeddings else 2)
    dense = (m.params - ends - experts) / layout.pp + m.vocab * m.hidden  # the first stage has the embedding
    if layout.strategy == "fsdp2":
        # Experts are sharded over all data-parallel ranks, but by their first dimension: one expert at least.
        shards = min(m.experts, layout.dp_replicate * layout.dp_shard * layout.cp) if m.experts else 1
        held = dense / (layout.dp_shard * layout.cp) + experts / layout.pp / shards
    else:
        held = dense + experts / layout.pp / layout.ep
    assert resident(spec, 0).parameters == pytest.approx(4 * held / layout.tp, rel=0.15)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_exact_sheet_fits(path: Path) -> None:
    """The search asks pipeline ranks 0, 1 and the last of arrays of candidates; this is the sheet of the run itself."""
    spec = load_run(path)
    assert spec.cluster.accelerator is not None
    assert float(run_budget(spec).reserved) <= safe_bytes(spec.cluster.accelerator, risk=0.1)


@pytest.mark.parametrize(("ranks", "mfu"), LLAMA_3)
def test_a_published_run_of_llama_3_405b(ranks: int, mfu: float) -> None:
    """Its interleaving is not published (4 stages a rank here); constants that saw no published anchor."""
    words = [
        "cluster.gpu=h100", f"cluster.nodes={16 * ranks}", "cluster.gpus_per_node=8", "precision.dtype=bf16",
        "data.seq=8192", "data.micro_batch=1", "data.global_batch=2048", "parallel.strategy=zero", "parallel.zero=1",
        f"parallel.dp_shard={ranks}", "parallel.tp=8", "parallel.sp=true", "parallel.pp=16",
        "parallel.schedule=interleaved", "parallel.virtual_stages=4",
    ]  # fmt: skip
    spec = load_run("llama3-405b", words)
    assert spec.cluster.accelerator is not None
    case = Case.of(spec, spec.cluster.accelerator).replace(software=SOFTWARE["megatron"])
    assert float(price(case, constants("anchors")).mfu) == pytest.approx(mfu, rel=0.15)
