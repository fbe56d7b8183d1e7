"""Sections of a spec about serving: the engine's sizes and choices, and service level objectives (SLOs)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .errors import SpecError
from .schema import Section, opt


@dataclass(frozen=True)
class EngineSpec(Section):
    """Sizes and choices of the inference engine. Zeros are filled in for the device at hand."""

    section: ClassVar[str] = "engine"

    device: str = opt("auto", "where it runs: cpu, cuda, or auto for a GPU where there is one")
    dtype: str = opt("auto", "precision of weights and of the cache (auto: bf16 on a GPU, fp32 on a CPU)",
                     choices=("auto", "fp32", "bf16", "fp16"))  # fmt: skip
    kv_dtype: str = opt("auto", "what the cache holds (auto: as dtype)", choices=("auto", "fp8", "int8"))
    block: int = opt(16, "tokens in one block of the cache", ge=1)
    blocks: int = opt(0, "blocks in the pool (0: as many as memory holds)", ge=0)
    memory: float = opt(0.9, "part of the GPU's memory that weights and cache may take together", gt=0, le=1)
    context: int = opt(0, "longest sequence, prompt and answer together (0: the model's context)", ge=0)
    max_seqs: int = opt(256, "sequences that run at once", ge=1, le=16384)
    max_batch_tokens: int = opt(
        0,
        "tokens of one step, prompts and answers together (0: 2048 to 8192 by the GPU and the model, 512 on a CPU)",
        ge=0,
    )
    prefix_cache: bool = opt(True, "keep the blocks of finished sequences for others that begin alike")
    kv_host_gib: float = opt(0.0, "GiB of host memory below the cache, for blocks that it evicts (0: none)", ge=0)
    kv_disk: str = opt("", "folder below host memory, of this server alone; found again by the next one")
    kv_disk_gib: float = opt(0.0, "GiB of it", ge=0)
    kv_shared: str = opt("", "store that servers share: a folder, or tcp://HOST:PORT of `lmworks kv-store`")
    kv_shared_gib: float = opt(0.0, "GiB of a shared folder (0: no limit)", ge=0)
    kv_listen: str = opt("", "tcp://HOST:PORT where other servers read this one's blocks")
    kv_peers: list[str] = opt([], "tcp://HOST:PORT of servers whose blocks requests may name")
    adapter_store: str = opt("", "folder of LoRA adapters, a folder each, which are loaded when requests name them")
    warm_adapters: int = opt(50, "adapters of the store that are loaded at once", ge=1)
    graphs: bool = opt(True, "replay decoding steps as CUDA graphs")
    graph_prompts: bool = opt(True, "record small steps that compute prompts too, when their kind comes again")
    batch_invariant: bool = opt(False, "a request gives bitwise the same result alone and in any batch")
    tp: int = opt(1, "ranks that share every layer", ge=1)
    speculate: str = opt("none", "who guesses tokens ahead: none, ngram, or draft (a smaller model)",
                         choices=("none", "ngram", "draft"))  # fmt: skip
    draft: str = opt("", "folder of the smaller model, where speculate = 'draft'")
    guesses: int = opt(4, "tokens that are guessed ahead in a step", ge=1, le=64)

    def check(self) -> None:
        if (self.speculate == "draft") != bool(self.draft):
            raise SpecError("engine.speculate = 'draft' and engine.draft = FOLDER go together: give both or neither")
        self.check_tiers()

    def check_tiers(self) -> None:
        """Of the KV cache, below the device."""
        if bool(self.kv_disk) != bool(self.kv_disk_gib):
            raise SpecError("engine.kv_disk = FOLDER and engine.kv_disk_gib go together: give both or neither")
        given = [
            name for name in ("kv_host_gib", "kv_disk", "kv_shared", "kv_listen", "kv_peers") if getattr(self, name)
        ]
        if given and not self.kv_host_gib:
            raise SpecError(f"engine.{given[0]}: blocks pass through host memory on their way; set engine.kv_host_gib")
        if given and not self.prefix_cache:
            raise SpecError(f"engine.{given[0]}: tiers extend the prefix cache; use engine.prefix_cache = true")


# --- slo -------------------------------------------------------------------------------------------------


OBJECTIVES = ("ttft", "tpot", "e2e")  # time to first token, time per output token after it, the whole request
FORMER = {"itl": "tpot"}  # what `bench serve` called it
EXAMPLE = "write seconds, e.g. ttft=0.5,tpot=0.05,e2e=10"


def parse_slo(text: str) -> dict[str, float]:
    """Seconds by objective; any may be left out."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        typed, _, value = (word.strip() for word in part.partition("="))
        name = FORMER.get(typed, typed)
        if name not in OBJECTIVES:
            raise SpecError(f"--slo {part!r}: {typed!r} is not an SLO here, {', '.join(OBJECTIVES)} are; {EXAMPLE}")
        if name in found:
            raise SpecError(f"--slo {text!r}: {name} is given twice")
        found[name] = seconds(part, value)
    return found


def seconds(part: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"--slo {part!r} is not KEY=SECONDS: {EXAMPLE}")
    if number <= 0:
        raise SpecError(f"--slo {part!r} must be more than 0: {EXAMPLE}")
    return number
