"""Tokens a second of SFT on packed conversations beside pretraining at the same shape, layout and precision.

python benchmarks/sft_speed.py --save                                  # llama3-1b, rows of 2,048 tokens, on a GPU
python benchmarks/sft_speed.py --model tiny --seq 128 --steps 3        # on a CPU, to try it
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import write_result

from lmworks.align.post_trainer import trainer_class
from lmworks.spec import RunSpec
from lmworks.train.prefetcher import Prefetcher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    result: dict[str, Any] = {"model": options.model, "seq": options.seq}
    with tempfile.TemporaryDirectory() as folder:
        chats = write_chats(Path(folder) / "chats.jsonl", options.seq)
        common = {
            "model": {"preset": options.model, "context": options.seq, **({} if cuda else {"vocab": 258})},
            "optim": {"steps": 1000},
            "precision": {"dtype": "bf16", "weights": "bf16"} if cuda else {},
        }
        sizes = {"seq": options.seq, "micro_batch": 8 if cuda else 2, "global_batch": 16 if cuda else 4}
        runs = {
            "pretraining": {**common, "data": sizes},
            "sft": {
                **common, "align": {"method": "sft"}, "data": {**sizes, "path": str(chats), "tokenizer": "bytes"},
            },
        }  # fmt: skip
        trainers = {}
        for name, table in runs.items():
            trainers[name] = trainer_class(spec := RunSpec.from_dict(table))(
                spec, Path(folder) / name, quiet=True, force=True
            )
            result[name] = measure(trainers[name], options.steps)
            print(name, json.dumps(result[name]), flush=True)
    result["ratio"] = result["sft"]["tokens_per_s"] / result["pretraining"]["tokens_per_s"]
    print(f"SFT has {result['ratio']:.3f} of pretraining's tokens a second")
    if options.save:
        print(write_result("sft_speed", result))


def write_chats(path: Path, seq: int) -> Path:
    """Conversations of 40 to `seq` / 2 bytes."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(2000):
            size = int(min(seq // 2, 40 * 2 ** draw.uniform(0, 5)))
            text = "".join(draw.choices("abcdefgh ", k=size))
            turns = [{"role": "user", "content": text[: size // 3]}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def measure(trainer: Any, steps: int) -> dict[str, Any]:
    trainer.build()
    stream = Prefetcher(trainer.batches, 0, trainer.device)
    trainer.prefetcher = stream
    seconds = []
    for number in range(steps + 3):
        began = time.perf_counter()
        trainer.next_step(stream)
        if number >= 3:  # the first ones compile
            seconds.append(time.perf_counter() - began)
    positions = trainer.spec.tokens_per_step
    stream.close()
    return {"step_s": statistics.median(seconds), "tokens_per_s": positions / statistics.median(seconds)}


if __name__ == "__main__":
    main()
