"""Generation of a round alone: seconds of the engine for the answers of `online_round.py`, and where the host's go.

python benchmarks/rollout_generation.py grpo                                        # llama3-1b, on a GPU
python benchmarks/rollout_generation.py grpo --model tiny --prompts 4 --max-tokens 16 --rounds 1
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from online_round import PROMPT_TOKENS, answer_lengths, make_trainer, parse

from lmworks.engine.core.step_output import AsyncStepOutput


def main() -> None:
    options = parse(__doc__)
    tokens = sum(answer_lengths(options))
    with tempfile.TemporaryDirectory() as folder:
        rollouts = make_trainer(options, options.methods[0], Path(folder)).rollout_engine
        rollouts.wake()
        engine, seconds = rollouts.engine, Counter[str]()
        for part, name in (
            (engine.scheduler, "schedule"), (engine.runner, "launch"), (engine.runner, "admit"),
            (engine, "process_output"), (AsyncStepOutput, "wait"),
        ):  # fmt: skip
            time_calls(part, name, seconds)  # process_output contains wait: for the device
        prompts = np.random.default_rng(1).integers(97, 120, (options.prompts, PROMPT_TOKENS)).tolist()
        for _ in range(options.rounds + 1):  # the first one compiles and captures
            seconds.clear()
            began = time.perf_counter()
            rollouts.generate(prompts, list(range(options.prompts)))
            took = time.perf_counter() - began
            engine.weights_changed()
            parts = {name: round(found, 3) for name, found in seconds.items()}
            print(f"{took:.3f} s, {tokens / took:,.0f} tokens/s; host: {parts}", flush=True)


def time_calls(part: Any, name: str, seconds: Counter[str], clock: Callable[[], float] = time.perf_counter) -> None:
    """Add the seconds of each call of `part.name`."""
    call = getattr(part, name)

    def timed(*arguments: Any) -> Any:
        began = clock()
        try:
            return call(*arguments)
        finally:
            seconds[name] += clock() - began  # type: ignore[assignment]

    setattr(part, name, timed)


if __name__ == "__main__":
    main()
