"""Tables as people write them become jobs; what they leave out is said; no row spoils another."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest

from lmworks.cli.plan_validate import predict
from lmworks.plan.case import Case
from lmworks.plan.flops import hardware_flops_per_token, model_flops_per_token
from lmworks.plan.memory.reserve import reserve, usable
from lmworks.plan.memory.sheet import budget
from lmworks.plan.tables.columns import COLUMNS, NAMES, OTHER, column_named, number, parse, read
from lmworks.plan.tables.forecast import forecast_table
from lmworks.plan.tables.names import (
    framework_named,
    gpu_named,
    nic_named,
    precision_named,
    recompute_named,
    schedule_named,
    shape_named,
    shapes,
)
from lmworks.plan.tables.rows import Job, job, usual_framework
from lmworks.spec import ModelSpec, SpecError, catalogue

DOCS = Path(__file__).parents[2] / "docs" / "validation.md"


def jobs(text: str) -> list[Job]:
    return [job(cells) for cells in parse(text).rows]


# --- cells and columns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1,024", 1024), ("8.0", 8), ("1e3", 1000), ("1.3B", 1.3e9), ("2^13", 8192), (" 16 GPUs ", 16), ("1_000", 1000),
        ("~7b", 7e9), ("350M", 350e6), ("12288(1536 nodes)", 12288),
    ],
)  # fmt: skip
def test_numbers_as_people_write_them(cell: str, value: float) -> None:
    assert number(cell) == value


def test_a_k_of_tokens_is_1024() -> None:
    assert jobs("model,gpu,n_gpus,micro_batch,seq_len\nllama3-8b,h100,8,1,8k")[0].case.seq == 8192


def test_no_name_means_two_columns() -> None:
    names = [name for column, facts in COLUMNS.items() for name in (column, *facts["also"])]
    assert len(names) == len(set(names)) == len(NAMES)


def test_every_column_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [column for column in COLUMNS if f"`{column}`" not in text] == []


def test_results_are_not_read_and_strange_columns_are_listed() -> None:
    table = parse("model,n_gpus,Tokens / sec / GPU,MFU (%),peak memory (GB),colour\nllama3-8b,8,1,2,3,red")
    assert table.rows == [{"model": "llama3-8b", "n_gpus": "8", OTHER: "red"}]
    assert table.results == ("Tokens / sec / GPU", "MFU (%)", "peak memory (GB)")
    assert table.unknown == ("colour",)


@pytest.mark.parametrize(
    ("header", "column"),
    [
        ("tensor parallelism", "tp"), ("TP size", "tp"), ("TP (tensor)", "tp"), ("Pipeline Parallelism Degree", "pp"),
        ("context-parallelism", "cp"), ("Expert parallelism (EP)", "ep"), ("data parallelism", "dp"),
        ("data", ""), ("model", "model"), ("tokens/s/GPU", ""), ("tensor pipeline", ""),
    ],
)  # fmt: skip
def test_parallel_axes_by_any_spelling(header: str, column: str) -> None:
    assert column_named(header) == column


def test_a_context_of_words_is_no_sequence_length() -> None:
    words = jobs("model,gpu,n_gpus,context,seq_len\nllama3-8b,h100,8,our new stack,4096")
    assert words[0].case.seq == 4096
    assert jobs("model,gpu,n_gpus,context\nllama3-8b,h100,8,16k")[0].case.seq == 16384


def test_bom_semicolons_empty_cells_and_short_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes("\ufeffmodel;n_gpus;tp\nllama3-8b;8;N/A\n;;\nllama3-70b\n".encode())
    assert read(file).rows == [{"model": "llama3-8b", "n_gpus": "8"}, {"model": "llama3-70b"}]


def test_a_markdown_table() -> None:
    table = parse("| Model | #-GPUs | TP |\n|---|---:|:-:|\n| LLAMA3-8B | 8 | 2 |\n")
    assert table.rows == [{"model": "LLAMA3-8B", "n_gpus": "8", "tp": "2"}]


@pytest.mark.parametrize("text", ["", "colour,taste\nred,sweet"])
def test_a_table_without_known_columns_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"columns|column is known"):
        parse(text)


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100-SXM", "H100-SXM-80GB"), ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("DGX-A100", "A100-SXM-80GB"),
        ("A100-80GB SXM (Selene)", "A100-SXM-80GB"), ("A100 40 GB", "A100-SXM-40GB"), ("a100 pcie", "A100-PCIe-80GB"),
        ("H200, 400Gb/s per GPU", "H200-SXM-141GB"), ("V100 DGX-2", "V100-SXM2-32GB"), ("TPU v5p", "TPU v5p"),
        ("GB200 NVL72", "GB200"), ("gh200", "GH200-96GB"), ("MI300X", "MI300X"), ("DGX-B200", "B200-SXM"),
    ],
)  # fmt: skip
def test_gpus_in_free_text(text: str, name: str) -> None:
    gpu, said = gpu_named(text)
    assert gpu.name == name
    assert said == []


def test_a_part_that_the_catalogue_lacks() -> None:
    gpu, said = gpu_named("H100 96GB HBM2e 2.4TB/s 500W cap, 400Gb/s per GPU (Grand Teton)")
    assert (gpu.memory_gb, gpu.bandwidth_gbs, gpu.tdp_w, gpu.bf16_tflops) == (96, 2400, 500, 989)
    assert "96" in said[0]
    assert gpu_named("A100-SXM", 40)[0].name == "A100-SXM-40GB"
    assert gpu_named("H800")[0].link_gbs == 200
    with pytest.raises(SpecError, match="'Trainium9' is not in the catalogue"):
        gpu_named("Trainium9")


@pytest.mark.parametrize(
    ("text", "gbs"),
    [("1600 Gbps/node RoCE", 25), ("400Gb/s per GPU", 50), ("800", 12.5), ("8x200Gb HDR", 25), ("NDR", 50)],
)  # fmt: skip
def test_links_between_nodes(text: str, gbs: float) -> None:
    assert nic_named(text, 8) == gbs


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Megatron-LM 23e00ed / TE 2.11", "megatron"), ("NeMo 24.07", "megatron-bridge"), ("DeepSpeed", "deepspeed"),
        ("Megatron-DeepSpeed (data/README.md)", "megatron-deepspeed"), ("torchtitan", "torchtitan"),
        ("bigscience", "megatron-deepspeed"),
        ("torchtitan + compile", "torchtitan-compile"), ("MosaicML/llm-foundry", "llm-foundry"),
        ("PyTorch FSDP", "torchtitan"), ("HF Trainer/accelerate", "huggingface"), ("Narayanan2021", "megatron-2021"),
        ("ZeRO++ on 64 GPUs", "deepspeed"), ("zero-3", "deepspeed"), ("AI-Hypercomputer/maxtext", "maxtext"),
    ],
)  # fmt: skip
def test_frameworks(text: str, name: str) -> None:
    found = framework_named(text)
    assert found and found.name == name


@pytest.mark.parametrize("text", ["a stack of our own", "schedule: zero bubble", "zero overhead"])
def test_what_names_no_framework(text: str) -> None:
    assert framework_named(text) is None


@pytest.mark.parametrize(
    ("text", "billions"),
    [
        ("meta-llama/Llama-2-7b-hf", 6.74), ("Llama-3.1-70B-Instruct", 70.6), ("llama3.1-405B", 405.9),
        ("GPT3-175B", 174.6),
        ("Mixtral 8x7B", 46.7), ("Qwen2.5-7B", 7.6), ("Qwen3 30B-A3B", 30.5), ("gpt2-xl", 1.56), ("BLOOM-176B", 176.2),
        ("turing-530B", 529.6), ("megatron-1T", 1008), ("Nemotron4-340B", 341), ("mpt-30b", 29.97),
    ],
)  # fmt: skip
def test_public_models(text: str, billions: float) -> None:
    shape = shape_named(text)
    assert shape
    assert ModelSpec.from_dict({**shape, "context": 2048}).params / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_name_of_another_size_is_not_taken_for_it() -> None:
    assert shape_named("gpt3-2.5b") is None
    assert shape_named("llama-6b") is None
    assert all("heads" in shape and "vocab" in shape for _, shape in shapes())


def test_a_global_batch_outweighs_an_accumulation_that_contradicts_it() -> None:
    """512 sequences in micro-batches of 4 over 16 ranks are 8 of each, whatever the row says."""
    header = "model,gpu,n_gpus,pp,micro_batch,global_batch,ga,seq_len,framework\n"
    (found,) = jobs(f"{header}llama3-8b,h100,64,4,4,512,2,4096,Megatron-LM")
    assert (found.case.accumulation, found.case.global_batch) == (8, 512)
    assert any("the row says 2" in said for said in found.assumed)


def test_a_tpu_runs_no_pytorch_unless_it_is_said() -> None:
    """So nothing is recomputed because torchtitan usually would."""
    (found,) = jobs("model,gpu,n_gpus,micro_batch,seq_len\nllama2-7b,TPU v5p,64,4,4096")
    assert (found.case.software.name, found.case.zero, found.case.recompute) == ("maxtext", 3, "none")


def test_settings_of_a_recipe_by_model_gpu_release_and_format() -> None:
    """Megatron-Bridge's: a CUDA graph of the step from 26.06 on for MXFP8, BF16 as before, nothing of a dense model."""
    found = jobs(
        "release,model,system,n_gpus,ep,mbs,gbs,seq_len,precision,framework\n"
        "26.06.01 NeMo Container,Qwen3_30B_a3B,DGX-GB200,8,8,4,512,4096,MXFP8,Megatron-Bridge\n"
        "26.06.01 NeMo Container,Qwen3_30B_a3B,DGX-GB200,8,8,4,512,4096,BF16,Megatron-Bridge\n"
        "26.02 NeMo Container,Qwen3_30B_a3B,DGX-B200,8,8,1,512,4096,MXFP8,Megatron-Bridge\n"
        "26.02 NeMo Container,Qwen3_30B_a3B,DGX-H100,16,8,1,512,4096,FP8,Megatron-Bridge\n"
        "26.06 NeMo Container,LLAMA3_70B,DGX-GB200,64,1,1,128,8192,MXFP8,Megatron-Bridge\n"
    )
    traits = [
        (one.case.software.dispatch_once, one.case.software.overlapped_dispatch, one.case.software.one_graph)
        for one in found
    ]
    assert traits == [(True, True, True), (True, False, False), (False,) * 3, (True, True, False), (False,) * 3]


def test_words_for_policies() -> None:
    assert [recompute_named(word) for word in ("true (full)", "attn_only", "per-op SAC", "no recompute", "")] == [
        "full", "attention", "selective", "none", "",
    ]  # fmt: skip
    maxtext = ("minimal", "minimal_with_context", "save_dot_except_mlpwi", "qkv_proj_offloaded", "full")
    assert [recompute_named(word) for word in maxtext] == ["attention", "selective", "mlp", "full", "full"]
    assert [precision_named(word) for word in ("amp_bf16", "FP8-MX", "NVFP4", "float16", "mixed")] == [
        "bf16", "fp8", "fp4", "fp16", "",
    ]  # fmt: skip
    assert [schedule_named(word) for word in ("Interleaved 1F1B", "pre-interleaving", "1F1B", "ZBV")] == [
        "interleaved", "", "1f1b", "zbv",
    ]  # fmt: skip


# --- jobs -------------------------------------------------------------------------------------------------------


def test_a_full_row_assumes_nothing() -> None:
    (found,) = jobs(
        "model,gpu,n_gpus,tp,pp,dp,zero,interleave,micro_batch,global_batch,seq_len,precision,recompute,sp,framework,optimizer\n"
        "llama3-70b,H100-SXM,256,8,4,8,1,5,1,1024,8192,bf16,none,True,Megatron-LM,adamw"
    )
    case = found.case
    assert found.assumed == () and found.unknown == () and not found.others and found.spread == 0
    assert (case.tp, case.pp, case.dp_shard, case.virtual, case.schedule) == (8, 4, 8, 5, "interleaved")
    assert (case.micro_batch, case.accumulation, case.global_batch, case.seq) == (1, 128, 1024, 8192)
    assert (case.zero, case.sp, case.recompute, case.software.name) == (1, True, "none", "megatron")


def test_unknown_fields_are_said_and_priced_otherwise_too() -> None:
    (found,) = jobs("model,gpu,n_gpus,global_batch,seq_len,framework\nllama3-8b,h100,64,256,8192,PyTorch FSDP")
    assert {"recompute", "micro_batch", "precision"} <= set(found.unknown)
    assert any(text.startswith("micro_batch = ") for text in found.assumed)
    assert {case.recompute for case in found.others["recompute"]} == {"none", "full"}
    assert {float(case.global_batch) for cases in found.others.values() for case in cases} == {256.0}


def test_selective_means_attention_to_megatron_and_products_to_torchtitan() -> None:
    header = "model,gpu,n_gpus,micro_batch,seq_len,recompute,framework\n"
    megatron, titan = jobs(
        header + "llama3-8b,h100,8,1,8192,selective,megatron\nllama3-8b,h100,8,1,8192,selective,torchtitan"
    )
    assert (megatron.case.recompute, titan.case.recompute) == ("attention", "selective")


def test_batches_in_every_spelling() -> None:
    header = "model,gpu,n_gpus,tp,global_batch,micro_batch,accumulation,local_batch,global_batch_tokens,batch,seq_len\n"
    rows = jobs(
        header
        + "llama3-8b,h100,16,2,64,2,,,,,4096\n"  # 64 / 8 ranks = 8, in 4 passes
        + "llama3-8b,h100,16,2,,2,4,,,,4096\n"
        + "llama3-8b,h100,16,2,64,,4,,,,4096\n"
        + "llama3-8b,h100,16,2,,2,,,262144,,4096\n"
        + "llama3-8b,h100,16,2,,2,,,256k,,4096\n"  # 2**18 divides, 256,000 does not
        + "llama3-8b,h100,16,2,,,,8,,,4096\n"
        + "llama3-8b,h100,16,2,,,,,,64,4096\n"
    )
    assert [float(row.case.global_batch) for row in rows] == [64] * 7
    assert [(row.case.micro_batch, row.case.accumulation) for row in rows[:6]] == [(2, 4)] * 5 + [(8, 1)]


def test_sharding_words() -> None:
    header = "model,gpu,n_gpus,micro_batch,seq_len,sharding,framework\n"
    words = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "ZeRO-2")
    rows = [row.case for row in jobs(header + "\n".join(f"llama3-8b,h100,32,1,4096,{word},FSDP" for word in words))]
    assert [(case.zero, case.reshard, case.dp_shard, case.dp_replicate) for case in rows] == [
        (3, True, 32, 1), (3, False, 32, 1), (3, True, 8, 4), (0, True, 1, 32), (2, True, 32, 1),
    ]  # fmt: skip


def test_a_table_is_of_one_code_base() -> None:
    """Rows without a split beside rows with one are Megatron's too; FSDP = 0 is a no, not a degree."""
    table = parse(
        "model,gpu,n_gpus,FSDP,TP,VP,MBS,seq_len\nllama3-8b,h100,8,0,1,n/a,1,8192\nllama3-70b,h100,64,1,4,5,1,8192"
    )
    assert usual_framework(table.rows) == "megatron"
    dense, sharded = (job(cells, usual="megatron").case for cells in table.rows)
    assert (dense.zero, sharded.zero) == (1, 3)
    assert usual_framework(parse("model,fsdp,tp\nllama3-8b,32,8").rows) == "torchtitan"


def test_a_family_and_a_size_in_columns_of_their_own() -> None:
    (found,) = jobs("Model size,model,Batch size,Activation checkpointing,gpu,n_gpus,framework,seq_len\n"
                    "8B,Llama 3,1,selective layer,A100,64,torchtitan,8192")  # fmt: skip
    assert found.case.model.params == pytest.approx(8.03e9, rel=0.001)
    assert (found.case.recompute, found.case.recompute_every, found.case.global_batch) == ("full", 2, 64)


def test_adapters_by_columns_or_by_words() -> None:
    """Rank 16 on q and v of Llama 3 8B: 6,815,744 weights, as PEFT counts them."""
    text = "model,task,lora_rank,target_modules,gpu,n_gpus,seq_len\n"
    whole, columns, quantized = jobs(
        text
        + 'llama3-8b,SFT,,,h100,8,4096\nllama3-8b,LoRA,16,"q_proj, v_proj",h100,8,4096\n'
        + "llama3-8b,QLoRA with rank=16 on all linear layers,,,h100,8,4096"
    )
    assert not whole.case.adapters
    assert 32 * sum(weight.size for weight in columns.case.adapters) == 6_815_744
    assert 32 * sum(weight.size for weight in quantized.case.adapters) == 41_943_040
    assert (columns.case.frozen_base, quantized.case.frozen_base) == ("", "nf4")
    full, adapted = (budget(one.case) for one in (whole, columns))
    assert adapted.optimizer < 1e-3 * full.optimizer and adapted.gradients < 1e-3 * full.gradients


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            "llama3-8b,LoRA,,",
            "task = 'LoRA': training of adapters is priced where a row tells lora_rank and lora_targets",
        ),
        ("llama3-8b,LoRA,16,", "task = 'LoRA': training of adapters is priced where a row tells lora_targets too"),
        ("llama3-8b,SFT,16,", "lora_rank = 16: training of adapters is priced where a row tells lora_targets too"),
        ("llama3-8b,LoRA,16,wte", "lora_targets = 'wte': 'wte' is not known; use q_proj, linear_qkv, attention, all"),
        ("mixtral-8x7b,LoRA,16,all", "adapters of experts are not priced, those of attention are"),
        ("llama3-8b,prefix tuning,,", "task = 'prefix tuning' is not priced; of adapters those of low rank are"),
    ],
)
def test_adapters_that_are_not_told_are_not_priced(row: str, reason: str) -> None:
    with pytest.raises(SpecError) as error:
        jobs("model,task,lora_rank,lora_targets,gpu,n_gpus,seq_len\n" + row + ",h100,8,4096")
    assert reason in str(error.value)


def test_a_model_by_its_size_and_a_layout_that_holds_it() -> None:
    (found,) = jobs("params_b,gpu,n_gpus,global_batch,seq_len,framework\n175,A100,1024,1536,2048,Megatron-LM")
    assert found.case.model.params == pytest.approx(175e9, rel=0.01)
    assert (found.case.tp, found.case.pp) == (8, 12) or found.case.tp * found.case.pp >= 64
    assert "tp" in found.unknown


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("llama3-8b,h100,7,2,1,1,4096", "n_gpus = 7 is not divisible by tp × pp × cp = 2"),
        ("llama3-8b,h100,-8,1,1,1,4096", "n_gpus = -8 is negative"),
        ("llama3-8b,h100,eight,1,1,1,4096", "n_gpus = 'eight' is not a number"),
        ("llama3-8b,h100,8.5,1,1,1,4096", "n_gpus = 8.5 is not a whole number"),
        ("llama3-8b,x1000,8,1,1,1,4096", "gpu = 'x1000' is not in the catalogue"),
        ("some-model,h100,8,1,1,1,4096", "model = 'some-model' is not a known name"),
    ],
)
def test_what_cannot_be_a_job_says_why(row: str, error: str) -> None:
    with pytest.raises(SpecError, match=error):
        jobs("model,gpu,n_gpus,tp,pp,micro_batch,seq_len\n" + row)


# --- one prediction a row ---------------------------------------------------------------------------------------


def simple_price(case: Case) -> Any:
    """Six-ND at 40% MFU, recompute paid for."""
    flops = hardware_flops_per_token(case.model, case.seq, case.recompute) * case.tokens_per_step
    seconds = flops / (0.4 * case.world * 989e12)
    mfu = model_flops_per_token(case.model, case.seq) * case.tokens_per_step / (seconds * case.world * 989e12)
    return SimpleNamespace(
        seconds=seconds, interval=(0.9 * seconds, 1.1 * seconds), mfu=mfu, hfu=0.4, parts={"work": seconds},
        tags={"work": "modelled"},
    )  # fmt: skip


def simple_budget(case: Case) -> Any:
    bytes_ = 16 * case.model.params / case.dp_shard + (
        0 if case.recompute == "full" and case.recompute_every == 2 else 120e9
    )
    return SimpleNamespace(allocated=bytes_, reserved=bytes_, to_dict=lambda: {"allocated": bytes_})


def test_every_row_is_answered() -> None:
    table = parse(
        "model,gpu,n_gpus,micro_batch,global_batch,seq_len,recompute\n"
        "llama3-8b,h100,64,1,64,8192,none\nnonsense,h100,64,1,64,8192,none\nllama3-8b,h100,64,1,64,8192,"
    )
    result = forecast_table(table, simple_price, simple_budget)
    known, nonsense, unknown = result["rows"]
    assert [row["row"] for row in result["rows"]] == [1, 2, 3]
    assert "not a known name" in nonsense["error"]
    assert known["step_s"] == pytest.approx(float(simple_price(job(table.rows[0]).case).seconds))
    assert known["tokens_per_s"] == pytest.approx(64 * 8192 / known["step_s"])
    assert known["tokens_per_s_per_gpu"] * 64 == pytest.approx(known["tokens_per_s"])
    assert known["tflops_per_gpu"] == pytest.approx(known["mfu"] * 989)
    assert known["step_s_low"] < known["step_s"] < known["step_s_high"]
    # What is left open widens the interval; what cannot have run is not taken.
    assert unknown["step_s_high"] / unknown["step_s_low"] > known["step_s_high"] / known["step_s_low"]
    assert (unknown["job"]["recompute"], unknown["job"]["recompute_every"]) == ("full", 2)
    assert "recompute = every second block: what was usual would not fit" in unknown["assumed"]


@pytest.mark.parametrize(
    ("framework", "spread"),
    [("torchtitan", reserve().spread), ("deepspeed", reserve().unseen)],
    ids=["seen", "not seen"],
)
@pytest.mark.parametrize("deviations", [-1, -0.1, 0.1, 1])
def test_a_row_fits_with_a_probability(framework: str, spread: float, deviations: float) -> None:
    """The normal distribution around what an H100 has, wider for a code base of which no memory was fitted."""
    need = usable(catalogue()["H100-SXM-80GB"]) * math.exp(deviations * spread)
    found = SimpleNamespace(allocated=need, reserved=need, to_dict=dict)
    table = parse(f"model,gpu,framework,n_gpus,micro_batch,seq_len,recompute\nllama3-8b,h100,{framework},8,1,8192,none")
    (row,) = forecast_table(table, simple_price, lambda case: found)["rows"]
    assert row["oom_probability"] == pytest.approx(NormalDist().cdf(deviations))
    assert row["fits"] is (deviations < 0)


def test_arithmetic_that_fails_is_one_rows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: Case) -> Any:
        raise ZeroDivisionError("by zero")

    table = parse("model,gpu,n_gpus,micro_batch,seq_len\nllama3-8b,h100,8,1,8192")
    (row,) = forecast_table(table, fails, simple_budget)["rows"]
    assert row["error"] == "could not be priced: ZeroDivisionError: by zero"


def test_the_command_answers_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("model,gpu,n_gpus,micro_batch,global_batch,seq_len\nllama3-8b,h100,8,1,16,8192\n?,,,,,\n")
    predict(file, json=True)
    result = json.loads(capsys.readouterr().out)
    first, second = result["rows"]
    assert first["step_s"] > 0 and first["memory"]["allocated"] > 0 and first["assumed"]
    assert "error" in second
    predict(file)
    assert "assumed" in capsys.readouterr().out
    with pytest.raises(SpecError, match="cannot read"):
        predict(tmp_path / "absent.csv")


# --- as people write them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "name", "count"),
    [
        ("64x H100", "H100-SXM-80GB", 64), ("8×A100-80GB", "A100-SXM-80GB", 8), ("DGX-B200 x 64", "B200-SXM", 64),
        ("64 H100s", "H100-SXM-80GB", 64), ("2x DGX-H100", "H100-SXM-80GB", 16), ("H200 x8", "H200-SXM-141GB", 8),
    ],
)  # fmt: skip
def test_a_number_of_gpus_in_the_name_of_the_gpu(gpu: str, name: str, count: int) -> None:
    (found,) = jobs(f"model,gpu,global_batch,seq_len\nllama3-8b,{gpu},128,4096")
    assert (found.case.gpu.name, found.case.world) == (name, count)
    assert f"n_gpus = {count}: from gpu = {gpu!r}" in found.assumed


@pytest.mark.parametrize("gpu", ["RTX 3090", "L40S", "A100 40 GB", "80GB A100", "GB200 NVL72", "MI300X", "4090"])
def test_other_numbers_in_the_name_of_a_gpu(gpu: str) -> None:
    (found,) = jobs(f"model,gpu,global_batch,seq_len\nllama3-8b,{gpu},128,4096")
    assert found.case.world == 1


def test_gpus_of_a_machine_beside_all_of_them() -> None:
    rows = "model,gpu,n_gpus,seq_len\nllama3-8b,4xH100,64,4096\nllama3-8b,8xH100,12,4096"
    first, second = parse(rows).rows
    assert (job(first).case.world, job(first).case.cluster.gpus_per_node) == (64, 4)
    with pytest.raises(SpecError, match="n_gpus = 12, but gpu = '8xH100' says 8"):
        job(second)


@pytest.mark.parametrize(("hidden", "heads"), [(4096, 32), (14336, 112), (14400, 120), (13824, 108), (100, 1)])
def test_heads_that_are_not_given_divide_the_width(hidden: int, heads: int) -> None:
    (found,) = jobs(f"hidden,layers,gpu,n_gpus,seq_len\n{hidden},8,h100,8,2048")
    assert found.case.model.heads == heads
    assert f"heads = {heads}: {hidden // heads} wide" in found.assumed


def test_heads_that_are_not_given_divide_among_tensor_parallel_ranks() -> None:
    (found,) = jobs("hidden,layers,gpu,n_gpus,tp,seq_len\n13824,8,a100,8,8,2048")
    assert found.case.model.heads == 96, "of 144; 108 heads of 128 are 13.5 on each of 8 ranks"


def test_a_size_tells_the_vocabulary_of_its_blocks() -> None:
    """BLOOM-176B: 70 blocks of 14,336 are 172.7B, and the rest is its vocabulary of 250,880; OPT's 175B has no rest."""
    head = "size,hidden,layers,heads,gpu,n_gpus,framework,seq_len\n"
    bloom, opt, odd = jobs(head + "\n".join(
        f"{size},{hidden},{layers},{heads},a100,64,deepspeed,2048"
        for size, hidden, layers, heads in (("176B", 14336, 70, 112), ("175B", 12288, 96, 96), ("40B", 4096, 32, 32))
    ))  # fmt: skip
    assert bloom.case.model.vocab == pytest.approx(250880, abs=5e8 / 14336)
    assert any("vocab" in said and "176B beside 70 layers" in said for said in bloom.assumed)
    assert opt.case.model.vocab == 51200 == odd.case.model.vocab, "6.7B of blocks are not 40B by their vocabulary"


@pytest.mark.parametrize(("framework", "vocab"), [("megatron", 50688), ("nemo", 50688), ("torchtitan", 50257)])
def test_megatron_pads_a_vocabulary_for_its_tensor_parallel_ranks(framework: str, vocab: int) -> None:
    rows = f"hidden,layers,vocab,gpu,n_gpus,tp,framework,seq_len\n4096,32,50257,h100,8,4,{framework},2048"
    assert jobs(rows)[0].case.model.vocab == vocab


@pytest.mark.parametrize(
    ("precision", "zero", "bytes_held"),
    [
        ("bf16", "", 2 + 4 + 12 / 8),
        ("bf16", "0", 2 + 4 + 12 / 8),  # what BLOOM's script says of it
        ("bf16", "1", 2 + 4 + 12 / 8),
        ("bf16", "3", (2 + 2 + 12) / 8),
        ("fp16", "", 2 + 2 + 12),
    ],
)
def test_deepspeeds_bf16_optimizer_shards_states_and_sums_gradients_in_fp32(
    precision: str, zero: str, bytes_held: float
) -> None:
    head = "hidden,layers,heads,gpu,n_gpus,dp,tp,precision,zero_stage,framework,seq_len\n"
    (found,) = jobs(f"{head}4096,8,32,a100,64,8,8,{precision},{zero},megatron-deepspeed,2048")
    held, params = budget(found.case), found.case.model.params / 8
    states = float(held.parameters + held.gradients + held.master + held.optimizer)
    assert states / params == pytest.approx(bytes_held, rel=0.04), "positions are not split"


def test_hsdp_shards_in_a_machine_and_copies_between_them() -> None:
    (found,) = jobs("model,gpu,n_gpus,sharding,framework,seq_len\nllama3-8b,h100,64,HSDP,torchtitan,4096")
    assert (found.case.zero, found.case.dp_shard, found.case.dp_replicate) == (3, 8, 8)


@pytest.mark.parametrize(
    ("cell", "policy", "said"),
    [
        ("['mlp', 'norm']", "mlp", "recompute = mlp: of mlp, norm"),
        ("core_attn", "attention", ""),
        ("mlp", "mlp", ""),
        ("moe_act,layernorm", "none", "recompute = none: of moe_act, layernorm"),
        ("mlp + core_attn", "full", "recompute = full: of mlp, core_attn"),
    ],
)
def test_lists_of_recomputed_modules(cell: str, policy: str, said: str) -> None:
    (found,) = jobs(f'model,gpu,n_gpus,framework,seq_len,recompute\nllama3-8b,h100,8,megatron,4096,"{cell}"')
    assert found.case.recompute == policy
    assert [text for text in found.assumed if text.startswith("recompute")] == ([said] if said else [])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("llama3-8b,LoRA fine-tuning,,", "task = 'LoRA': training of adapters is priced where a row tells lora_rank"),
        ("llama3-8b-qlora,,,", "model = 'qlora': training of adapters is priced where a row tells lora_rank"),
        (
            "llama3-8b,,rank-16 adapters,",
            "note = 'adapters': training of adapters is priced where a row tells lora_targ",
        ),
        ("llama3-8b,,,PEFT", "'PEFT': training of adapters is priced where a row tells lora_rank and lora_targets too"),
        ("llama3-8b,inference,,", "task = 'inference': a row of inference; lmworks plan serve predicts that"),
        ("llama3-8b,,,decode", "'decode': a row of inference; lmworks plan serve predicts that"),
        ("falcon-mamba-7b,,,", "mamba has layers that are not attention; not priced"),
        ("Nemotron-H 56B,,,", "Nemotron-H has layers that are not attention; not priced"),
        ("30B MoE,,,", "'30B MoE' is a mixture of experts that is not known by name; give layers, hidden, experts"),
        ("NewModel 100B-A5B,,,", "is a mixture of experts that is not known by name"),
    ],
)
def test_rows_that_are_not_priced_say_so_wherever_it_stands(row: str, reason: str) -> None:
    table = parse("model,task,note,colour,gpu,n_gpus,seq_len\n" + row + ",h100,8,4096")
    with pytest.raises(SpecError) as error:
        job(table.rows[0])
    assert reason in str(error.value)


def test_a_finetuning_of_all_weights_is_priced() -> None:
    (found,) = jobs("model,phase,task,gpu,n_gpus,seq_len\nllama2-7b,Finetuning,SFT,h100,8,4096")
    assert found.case.model.layers == 32
