"""How long it takes to encode and pack a file of conversations, and how full the rows are.

python benchmarks/example_data.py --examples 100000 --record
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import write_result

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversations(count: int) -> Iterator[dict[str, object]]:
    """One to three exchanges of words; lengths are log-normal."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(3000)]
    for _ in range(count):
        roles = ["user", "assistant"] * draw.choice([1, 1, 1, 2, 3])
        lengths = [max(3, int(draw.lognormvariate(3.5, 0.8))) for _ in roles]
        yield {
            "messages": [
                {"role": role, "content": " ".join(draw.choices(words, k=length))}
                for role, length in zip(roles, lengths, strict=True)
            ]
        }


def write_model(folder: Path, texts: list[str]) -> None:
    from tokenizers import AddedToken, Tokenizer

    from lmworks.data.tokenizer import train_bpe

    inner = Tokenizer.from_str(train_bpe(texts, 8000))
    inner.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHATML)


def cpu_seconds() -> float:
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in usage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/example_data.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["LMWORKS_CACHE"] = str(root / "cache")
        from lmworks.data.example_batches import ExampleBatches
        from lmworks.spec.run import DataSpec

        path = root / "chats.jsonl"
        lines = [json.dumps(one) for one in conversations(given.examples)]
        path.write_text("\n".join(lines))
        write_model(root, lines[:3000])
        data = DataSpec(
            kind="conversations", path=str(path), tokenizer=str(root), seq=given.seq, micro_batch=1, overlong="skip"
        )
        result: dict[str, Any] = {"conversations": given.examples, "bytes": path.stat().st_size, "seq": given.seq}
        for what in ("encode", "cached"):
            began, cpu = time.perf_counter(), cpu_seconds()
            batches = ExampleBatches(data, seed=0)
            result[f"{what}_s"] = round(time.perf_counter() - began, 1)
            result[f"{what}_cpu_s"] = round(cpu_seconds() - cpu, 1)
        report = batches.report
        result |= {"tokens": report.tokens, "trained_tokens": report.trained_tokens}
        result |= {"rows": report.rows, "fill": report.fill}
        print(json.dumps(result, indent=1))
        if given.record:
            write_result("example_data", result)


if __name__ == "__main__":
    main()
