"""What LoRA adapters cost an engine that has a thousand in its store and fifty loaded.

    python benchmarks/adapters.py            # llama3-1b (random weights), rank 8 on attention's four projections
    python benchmarks/adapters.py --small    # a tiny model on a CPU

The time to the first token of a request without an adapter, with one that is loaded, and with one that is not: its
files are read (from the page cache) and written into the slot of another. And tokens a second of 64 answers at once:
before any adapter is loaded, then with none, one, and all that fit. Folders beyond the first hundred are hard links.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import write_result
from torch import Tensor

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.loading import load_engine
from lmworks.model.peft import write_peft
from lmworks.spec import EngineSpec, ModelSpec
from lmworks.spec.lora import ADAPTERS, DEFAULT_ADAPTER, LoraSpec, target_linears

FILES_OF = 100  # adapters with files of their own


@dataclass(frozen=True)
class Case:
    model: str
    registered: int
    warm: int
    lora: LoraSpec
    prompt: int
    answer: int
    batch: int
    repeats: int
    options: dict[str, Any]


LORA = LoraSpec(rank=8, targets=["attention"])
GPU = Case("llama3-1b", 1000, 50, LORA, 128, 256, 64, 20, {"context": 4096, "blocks": 4096, "max_seqs": 64})
SMALL = Case("tiny", 120, 8, LORA, 16, 8, 8, 3, {"device": "cpu", "dtype": "fp32", "blocks": 256, "max_seqs": 8})


def write_store(root: Path, case: Case) -> None:
    model = ModelSpec.from_preset(case.model)
    for number in range(case.registered):
        folder = root / name_of(number)
        if number < FILES_OF:
            write_peft(folder, model, case.lora, adapter(model, case.lora, number), case.model)
            continue
        folder.mkdir()
        for file in (root / name_of(number % FILES_OF)).iterdir():
            os.link(file, folder / file.name)


def adapter(model: ModelSpec, lora: LoraSpec, seed: int) -> dict[str, Tensor]:
    luck, weights = torch.Generator().manual_seed(seed), {}
    for linear in target_linears(model, lora):
        shapes = {"lora_A": (lora.rank, linear.inputs), "lora_B": (linear.outputs, lora.rank)}
        for layer in range(model.layers):
            for key, shape in shapes.items():
                name = f"blocks.{layer}.{linear.name}.{ADAPTERS}.{DEFAULT_ADAPTER}.{key}"
                weights[name] = (0.01 * torch.randn(shape, generator=luck)).bfloat16()
    return weights


def name_of(number: int) -> str:
    return f"adapter-{number:04d}"


class Measurement:
    def __init__(self, engine: Engine, case: Case) -> None:
        self.engine, self.case = engine, case
        self.luck = torch.Generator().manual_seed(0)
        self.next = 0  # adapter that has not been asked for

    def request(self, name: str | None, tokens: int) -> Request:
        """With a prompt of its own: nothing is cached."""
        prompt = torch.randint(self.engine.runner.valid_vocab, (self.case.prompt,), generator=self.luck).tolist()
        return Request(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, adapter=name))

    def run(self, names: Sequence[str | None], tokens: int) -> float:
        """Seconds of requests that come at once."""
        requests = [self.request(name, tokens) for name in names]
        begin = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        done = self.engine.run()
        seconds = time.perf_counter() - begin
        if errors := [delta.result.error for delta in done if delta.result and delta.result.error]:
            raise SystemExit(f"{errors[0]}")
        return seconds

    def first_token_ms(self, names: Sequence[str | None]) -> float:
        return 1e3 * statistics.median(self.run([name], 1) for name in names)

    def rate(self, names: Sequence[str | None]) -> float:
        """Tokens a second; the second of two runs, as the first may capture graphs."""
        tokens = len(names) * self.case.answer
        return [tokens / self.run(names, self.case.answer) for _ in range(2)][1]

    def cold(self, count: int) -> list[str]:
        names = [name_of((self.next + number) % self.case.registered) for number in range(count)]
        self.next += count
        return names


def measure(engine: Engine, case: Case) -> dict[str, Any]:
    one, repeats = Measurement(engine, case), case.repeats
    none: list[str | None] = [None] * case.batch
    found: dict[str, Any] = {"answers_per_s": {}, "first_token_ms": {}}
    rates, first = found["answers_per_s"], found["first_token_ms"]
    rates["before any adapter"] = one.rate(none)
    first["before any adapter"] = one.first_token_ms([None] * repeats)
    first["the first adapter"] = one.first_token_ms(one.cold(1))
    rates["none of the loaded"] = one.rate(none)
    rates["one adapter"] = one.rate([name_of(0)] * case.batch)
    first["into a free slot"] = one.first_token_ms(one.cold(case.warm - 1))
    warm = [name_of(number) for number in range(case.warm)]
    rates[f"{case.warm} adapters"] = one.rate([warm[number % case.warm] for number in range(case.batch)])
    first["none of the loaded"] = one.first_token_ms([None] * repeats)
    first["loaded"] = one.first_token_ms(warm[:repeats])
    captured = graphs_of(engine)
    first["into the slot of another"] = one.first_token_ms(one.cold(repeats))
    begin = time.perf_counter()
    one.run(one.cold(case.batch), case.answer)
    rates["as many that are not loaded"] = case.batch * case.answer / (time.perf_counter() - begin)
    found["graphs_kept"] = captured <= graphs_of(engine)
    found["adapter_loads"] = engine.metrics.adapter_loads
    return found


def graphs_of(engine: Engine) -> set[Any]:
    assert isinstance(engine.runner, ModelRunner)
    return set() if engine.runner.graphs is None else set(engine.runner.graphs.captured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU; nothing is saved")
    small = parser.parse_args().small
    case = SMALL if small else GPU
    with tempfile.TemporaryDirectory() as folder:
        write_store(root := Path(folder), case)
        size = sum(file.stat().st_size for file in (root / name_of(0)).iterdir())
        spec = EngineSpec.from_dict({**case.options, "adapter_store": folder, "warm_adapters": case.warm})
        _, engine = load_engine(case.model, spec, None, 0)
        found = {
            "model": case.model, "registered": case.registered, "warm": case.warm, "rank": case.lora.rank,
            "targets": case.lora.targets, "adapter_bytes": size, "batch": case.batch, **measure(engine, case),
        }  # fmt: skip
        engine.close()
    for unit in ("first_token_ms", "answers_per_s"):
        for name, value in found[unit].items():
            print(f"{unit} {name}: {value:.1f}")
    print(f"graphs kept: {found['graphs_kept']}, loads: {found['adapter_loads']}")
    if not small:
        print(write_result("adapters", found))


if __name__ == "__main__":
    main()
