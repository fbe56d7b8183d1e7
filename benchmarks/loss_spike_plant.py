"""Plant the troubles that docs/runbooks/loss-spike.md finds: bad data, and a machine that fails for a moment.

python benchmarks/loss_spike_plant.py text            writes text.jsonl: 1,200 ordinary documents, and one of noise
python benchmarks/loss_spike_plant.py nan SPEC RUN    trains; a block gives one NaN at step 60, once
python benchmarks/loss_spike_plant.py flip SPEC RUN   trains on three ranks; one bit of one weight flips on rank 1
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import LMWorksError, RunSpec, load_run
from lmworks.train import Trainer

WORDS = [
    "def",
    "return",
    "for",
    "in",
    "if",
    "not",
    "self",
    "import",
    "x",
    "y",
    "value",
    "list",
    "text",
    "print",
    "open",
]
SHORT = ("optim.steps=80",)
AT = 60  # the step in which the machine fails


def write_text(path: Path) -> None:
    draw = random.Random(2)
    documents = [" ".join(draw.choices(WORDS, k=draw.randint(40, 120))) for _ in range(1200)]
    documents.insert(300, "".join(chr(draw.randint(33, 126)) for _ in range(2600)))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def before(trainer: Trainer, step: int, act: Any) -> None:
    take = trainer.train_step

    def acting(batches: Any) -> dict[str, Any]:
        if trainer.step + 1 == step:
            act()
        return take(batches)

    trainer.train_step = acting  # type: ignore[method-assign]


def train_with_nan(spec: RunSpec, run: Path) -> None:
    trainer = Trainer(spec, run, quiet=True)
    struck: list[int] = []

    def strike(_module: Any, _inputs: Any, output: Tensor) -> Tensor | None:
        if trainer.step + 1 != AT or struck:
            return None
        struck.append(AT)
        return output.index_fill(0, torch.tensor([0], device=output.device), float("nan"))

    before(trainer, 1, lambda: trainer.model.layers()[1].mlp.register_forward_hook(strike))
    trainer.run()


def train_with_flip(rank: int, spec: RunSpec, run: Path) -> None:
    trainer = Trainer(spec, run, quiet=True)

    def flip() -> None:
        weight = trainer.model.layers()[0].attention.q.weight
        weight.data.view(torch.int32).view(-1)[7] ^= 1 << 3

    if rank == 1:
        before(trainer, AT, flip)
    with suppress(LMWorksError):  # it says so in the run folder
        trainer.run()


def main() -> None:
    match sys.argv[1:]:
        case ["text"]:
            write_text(Path("text.jsonl"))
        case ["nan", spec, run]:
            train_with_nan(load_run(spec, [*SHORT, "health.rerun=true"]), Path(run))
        case ["flip", spec, run]:
            three = [*SHORT, "health.hash_every=10", "parallel.dp=3", "data.micro_batch=3", "data.global_batch=9"]
            on_ranks(3, train_with_flip, load_run(spec, three), Path(run))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
