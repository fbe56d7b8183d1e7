"""What people call things, in free text: a GPU, a code base, a model, a precision, a recompute policy."""

from __future__ import annotations

import contextlib
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from ...spec import PRESETS, Gpu, SpecError, catalogue
from ...spec.errors import did_you_mean
from ...spec.hardware import find_gpu_name
from ..software import SOFTWARE, Software

# Of entries whose words all stand in the text, the one with the most; its memory decides where two are left.
WORDS = {
    "V100-SXM2-32GB": ("v100",), "V100-PCIe-32GB": ("v100", "pcie"), "T4": ("t4",), "A10": ("a10",), "A10G": ("a10g",),
    "L4": ("l4",), "A30": ("a30",), "RTX A6000": ("a6000",), "RTX 3090": ("3090",), "RTX 4090": ("4090",),
    "RTX 5090": ("5090",), "RTX PRO 6000 Blackwell Server": ("rtx", "pro", "6000"), "L40S": ("l40s",),
    "A100-SXM-80GB": ("a100",), "A100-SXM-40GB": ("a100", "40gb"), "A100-PCIe-80GB": ("a100", "pcie"),
    "A100-PCIe-40GB": ("a100", "pcie", "40gb"), "H100-SXM-80GB": ("h100",), "H100-PCIe-80GB": ("h100", "pcie"),
    "H100-NVL-94GB": ("h100", "nvl"), "H200-SXM-141GB": ("h200",), "GH200-96GB": ("gh200",),
    "GH200-141GB": ("gh200", "141gb"), "H20": ("h20",), "B200-SXM": ("b200",), "GB200": ("gb200",),
    "B300-SXM": ("b300",), "GB300": ("gb300",), "MI250X": ("mi250x",), "MI300X": ("mi300x",), "MI325X": ("mi325x",),
    "MI355X": ("mi355x",), "Gaudi2": ("gaudi2",), "Gaudi3": ("gaudi3",), "Trainium2": ("trainium2",),
    "TPU v4": ("tpuv4",), "TPU v5e": ("tpuv5e",), "TPU v5p": ("tpuv5p",), "TPU v6e": ("tpuv6e",),
}  # fmt: skip
# Sold with slower links, otherwise the same part (GB/s, one direction).
SLOWER_LINKS = {"a800": ("a100", 200.0), "h800": ("h100", 200.0)}

FRAMEWORKS = [  # first match wins
    (r"llm-?foundry|mosaic|composer|\bmpt-", "llm-foundry"),
    (r"torch-?titan", "torchtitan"),
    (r"megatron[- ]?deepspeed|(gpt-?)?neox|megatron.*deepspeed|deepspeed.*megatron", "megatron-deepspeed"),
    (r"bigscience|\bbloom\b", "megatron-deepspeed"),
    (r"narayanan|korthikanti|megatron.*(202[012]\b)|ptd-?p", "megatron-2021"),
    (r"\bnemo\b|megatron[- ]bridge", "megatron-bridge"),
    (r"megatron|mcore|transformer[- ]?engine|bridge", "megatron"),
    (r"maxtext|\bpax(ml)?\b|\bjax\b", "maxtext"),
    (r"colossal|internevo|nanotron|picotron", "megatron"),
    (r"deepspeed|zero-?[123]|zero\+\+", "deepspeed"),
    (r"hugging|\bhf\b|accelerate|trainer|transformers|axolotl|trl\b|lightning|llama-?factory|unsloth", "huggingface"),
    (r"nanogpt|nanochat|litgpt|lit-gpt|karpathy", "nanogpt"),
    (r"lmworks", "lmworks"),
    (r"fsdp|pytorch|torchtune|torch\b|fms", "torchtitan"),
]  # fmt: skip
# The block of GPT-2 and GPT-3, as a model spec has it.
GPT = {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "tie_embeddings": True}
COMPILE = re.compile(r"compil|inductor")
ASYNC_TP = re.compile(r"async[ -]?tp|tp[-_ ]comm[-_ ]overlap|\bnemo\b|megatron[- ]bridge")  # NeMo's recipes have it on
OPTIMIZERS = [
    (r"8-?bit|bnb|bitsandbytes", "adamw8bit"), (r"adafactor", "adafactor"), (r"muon", "muon"), (r"sgd", "sgd"),
    (r"adam|lamb", "adamw"),
]  # fmt: skip


def gpu_named(text: str, memory_gb: float | None = None) -> tuple[Gpu, list[str]]:
    """The catalogue's entry, changed where the text itself says otherwise (memory, bandwidth, power)."""
    known = catalogue()
    if not memory_gb:
        with contextlib.suppress(SpecError):
            return known[find_gpu_name(text)], []
    words = re.sub(r"tpu[ _-]*v", "tpuv", text.lower())
    words = re.sub(r"gaudi[ _-]*(\d)", r"gaudi\1", re.sub(r"(\d)\s*gi?b\b(?!/s|ps)", r"\1gb ", words))
    said: list[str] = []
    link = 0.0
    for name, (like, slower) in SLOWER_LINKS.items():
        if name in words:
            words, link = words.replace(name, like), slower
    if memory_gb:
        words += f" {memory_gb:g}gb"
    parts = re.findall(r"[a-z]+\d+[a-z]*|\d+gb|[a-z]+|\d+", words)
    fitting = {name: want for name, want in WORDS.items() if name in known and all(want_ in parts for want_ in want)}
    if not fitting:
        raise SpecError(f"gpu = {text!r} is not in the catalogue{did_you_mean(text, known)}")
    gpu = known[max(fitting, key=lambda name: len(fitting[name]))]
    figures = {
        "memory_gb": memory_gb or figure(words, r"(\d+)gb (?!/s)"),
        "bandwidth_gbs": 1e3 * figure(words, r"([\d.]+)\s*tb/s"),
        "tdp_w": figure(words, r"(\d+)\s*w\b"),
        "link_gbs": link,
    }
    # A nominal 80 GB is close to what the catalogue says; another part's figures are not.
    changes = {
        key: value for key, value in figures.items() if value and abs(value / (getattr(gpu, key) or 1e9) - 1) > 0.03
    }
    if changes:
        said.append(f"gpu: {gpu.name} with " + ", ".join(f"{key} = {value:g}" for key, value in changes.items()))
        gpu = gpu.replace(**changes)
    return gpu, said


def without_count(text: str) -> tuple[str, int]:
    """ "64x H100", "H100 x 64", "64 H100s" and "2x DGX-H100" (of eight each) without the number, and the number."""
    leading = re.match(r"\s*(\d+)\s*(?:[x×*]\s*(?=[a-z])|\s(?=[a-z]+\d+s\b))", text, re.IGNORECASE)
    trailing = re.search(r"(?:\s[x×*]\s*|(?<=\d)[x×*])(\d+)\s*$", text, re.IGNORECASE)
    found = leading or trailing
    if not found:
        return text, 0
    name = (text[found.end() :] if leading else text[: found.start()]).strip()
    name = re.sub(r"(?i)\b((?:[abhv]|gb|mi)\d+x?)s\b", r"\1", name)
    return name, int(found[1]) * (8 if re.match(r"(?i)(dgx|hgx)", name) and leading else 1)


def figure(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    return float(found[1]) if found else 0.0


def nic_named(text: str, gpus_per_node: int) -> float:
    """GB/s of one GPU, one direction, from "1600 Gbps/node RoCE", "400Gb/s per GPU", "8x200Gb" or 800 (of a node)."""
    words = text.lower()
    many = re.search(r"(\d+)\s*[x×]\s*(?:hdr|ndr|edr)?\s*(\d+)", words)
    if many:
        return float(many[1]) * float(many[2]) / 8 / gpus_per_node
    gbits = figure(words, r"([\d.]+)\s*(?:gb|$)") or {"hdr": 200.0, "ndr": 400.0, "edr": 100.0, "xdr": 800.0}.get(
        next(iter(re.findall(r"hdr|ndr|edr|xdr", words)), ""), 0.0
    )
    alone = re.search(r"per gpu|/gpu|hdr|ndr|edr|xdr", words) and "node" not in words
    return gbits / 8 / (1 if alone else gpus_per_node)


def framework_named(text: str) -> Software | None:
    """The code base that the text speaks of; None where it names none."""
    words = text.lower()
    for pattern, name in FRAMEWORKS:
        if re.search(pattern, words):
            compiled = f"{name}-compile"
            return SOFTWARE[compiled if COMPILE.search(words) and compiled in SOFTWARE else name]
    return None


@cache
def shapes() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    kinds: dict[str, dict[str, Any]] = {"llama": {}, "gpt": GPT}
    tables = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8"))
    return [
        (re.compile(rf"(?<![a-z0-9])(?:{name})(?![a-z0-9.]|-?[0-9.]+[bm](?![a-z0-9]))"), {**kinds[kind], **shape})
        for kind, entries in tables.items()
        for name, shape in entries.items()
    ]


def shape_named(text: str) -> dict[str, Any] | None:
    """The shape of a preset or a public model whose name stands in the text; the longest name wins."""
    if text in PRESETS:
        return dict(PRESETS[text])
    words = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
    found = [(match.end() - match.start(), shape) for name, shape in shapes() if (match := name.search(words))]
    return dict(max(found, key=lambda pair: pair[0])[1]) if found else None


def precision_named(text: str) -> str:
    """ "" where the text names none."""
    words = text.lower()
    for pattern, dtype in [
        (r"(?<![a-z])(nv|mx)?fp4|e2m1", "fp4"), (r"(?<![a-z])(mx)?fp8|float8|e4m3", "fp8"),
        (r"bf16|bfloat16|bf-?16", "bf16"),
        (r"fp16|float16|half|f16", "fp16"), (r"fp32|float32|tf32|f32", "fp32"),
    ]:  # fmt: skip
        if re.search(pattern, words):
            return dtype
    return ""


# Modules of a block that a list may name, as Megatron's --recompute-modules does: large ones, and small ones whose
# recompute is a few kernels.
LARGE_MODULES = {"core_attn": "attention", "attn": "attention", "attention": "attention", "self_attn": "attention",
                 "mlp": "mlp", "ffn": "mlp", "moe": "mlp", "experts": "mlp"}  # fmt: skip
SMALL_MODULES = {"norm", "norms", "layernorm", "rmsnorm", "ln", "act", "activation", "moe_act", "swiglu", "gelu",
                 "silu", "rope", "mla_up_proj", "router", "embedding", "dropout", "shared_experts"}  # fmt: skip


def recompute_modules(text: str) -> tuple[str, str]:
    """The policy nearest to a list of modules ("['mlp', 'norm']"), and what that leaves out; "" where it is no list."""
    words = [word for word in re.split(r"[^a-z0-9_]+", text.lower()) if word]
    if not words or not all(word in LARGE_MODULES or word in SMALL_MODULES for word in words):
        return "", ""
    if len(words) == 1 and words[0] in ("attn", "attention", "core_attn"):
        return "attention", ""
    large = {LARGE_MODULES[word] for word in words if word in LARGE_MODULES}
    policy = "full" if len(large) > 1 else next(iter(large), "none")
    small = [word for word in words if word in SMALL_MODULES]
    left = f"recompute = {policy}: of {', '.join(words)}" if small or len(large) > 1 or policy == "none" else ""
    return policy, left


# MaxText's remat_policy, by what it does not keep: scores of attention; what no product makes; the MLP; all but a few.
REMAT = [  # first match wins
    (r"minimal_(with_context|flash)", "selective"), (r"\bminimal", "attention"), (r"except_mlp", "mlp"),
    (r"save_(qkv|out)_proj|qkv_proj_offloaded", "full"),
]  # fmt: skip


def recompute_named(text: str) -> str:
    """ "" where the text names none. "selective layer" is every second layer, whole."""
    words = text.lower()
    for pattern, policy in REMAT:
        if re.search(pattern, words):
            return policy
    if re.search(r"\b(no|without|w/o|zero) (act\w* )?(re-?comp|checkpoint|ac\b)|\bnone\b|\bno ac\b", words):
        return "none"
    if re.search(r"selective layer|every (2nd|second|other)", words):
        return "full"
    if re.search(r"attn_only|core[_ -]?attn|attention[_ -]only|^attention$|attn", words):
        return "attention"
    if re.search(r"selective|\bsac\b|per-?op|\bop\b", words):
        return "selective"
    if re.search(r"full|block|uniform|every layer|all layers", words):
        return "full"
    return ""


SCHEDULES = [  # first match wins
    (r"dual-?pipe", "dualpipev"), (r"zb-?v|zbv", "zbv"), (r"zero[- ]?bubble|\bzb", "interleaved-zero-bubble"),
    (r"looped|bfs|breadth", "looped-bfs"), (r"(?<!pre-)(?<!non-)(?<!no )(?<!without )interleav|vpp", "interleaved"),
    (r"1f1b|pipedream", "1f1b"), (r"gpipe", "gpipe"),
]  # fmt: skip


def schedule_named(text: str) -> str:
    """ "" where the text names none."""
    return next((name for pattern, name in SCHEDULES if re.search(pattern, text.lower())), "")


def optimizer_named(text: str) -> str:
    for pattern, name in OPTIMIZERS:
        if re.search(pattern, text.lower()):
            return name
    raise SpecError(f"optimizer = {text!r} is not known; known: {', '.join(name for _, name in OPTIMIZERS)}")
