"""Host time of the engine for each token of a large batch: a device that takes no time, and the answers of a round.

    python benchmarks/engine_host.py                   # 1,024 answers of 240 tokens on average, as `online_round.py`
    python benchmarks/engine_host.py --profile         # functions by their own time

A forward pass and the sampler are replaced by tokens that are ready; everything else is the engine's: scheduling,
packing of inputs, reading of tokens and log-probabilities.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from online_round import PROMPT_TOKENS, answer_lengths, sample_with_lengths
from rollout_generation import time_calls

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.sampler import SamplerOutput
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec

VOCAB = 258


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = answer_lengths(options)
    engine, seconds = make_engine(len(lengths)), Counter[str]()
    if not options.profile:
        for part, name in (
            (engine.scheduler, "schedule"), (engine.runner, "launch"), (engine.runner, "admit"),
            (engine, "process_output"),
        ):  # fmt: skip
            time_calls(part, name, seconds, time.process_time)
    prompts = np.random.default_rng(1).integers(97, 120, (options.prompts, PROMPT_TOKENS)).tolist()
    for _ in range(options.rounds):
        seconds.clear()
        profile = cProfile.Profile()
        began = time.process_time()
        if options.profile:
            profile.enable()
        sample_with_lengths(engine, prompts, range(options.prompts), lengths)
        profile.disable()
        seconds["whole"] = time.process_time() - began  # type: ignore[assignment]
        engine.weights_changed()
        print({name: f"{1e6 * found / sum(lengths):.2f} µs a token" for name, found in seconds.items()}, flush=True)
        if options.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def make_engine(seqs: int) -> Engine:
    shape = ModelSpec.from_preset("tiny").replace(vocab=VOCAB, context=2048)
    spec = EngineSpec(
        device="cpu", dtype="fp32", context=2048, max_seqs=seqs, max_batch_tokens=8192, blocks=seqs * 2048 // 16
    )
    runner: Any = ModelRunner(GPT(shape), spec, "cpu", VOCAB - 1)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(97, 120, 8192))
    logprobs, bad = -torch.rand(8192), torch.zeros(8192, dtype=torch.bool)
    runner.states = lambda batch: batch.tokens
    runner.logits = lambda states, batch: states
    runner.sample = lambda logits, rows, *_: SamplerOutput(
        tokens[: len(rows)], logprobs[: len(rows)], None, None, bad[: len(rows)]
    )
    return Engine(runner, None)


if __name__ == "__main__":
    main()
