"""Write the runs of this folder with the code of an earlier commit (README.md says which), in the current folder:

    PYTHONPATH=$checkout/src:$checkout/tests python make.py

`data/`; for each run NAME: `NAME/`, stopped after step 5 with a checkpoint of step 4, and in `expected.json` the losses
of the same run without the stop and hashes of the tensors saved at step 4.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from layouts import on_ranks
from lmworks.data import prepare
from lmworks.spec import RunSpec
from lmworks.spec.load import apply_overrides
from lmworks.train import Trainer
from tiny import WORDS, Crash, before_step, crash, curve, saved

STEPS, SAVED, STOPPED = 8, 4, 5
COMMON = {
    "model": {
        "preset": "tiny", "layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 16, "vocab": 258,
        "tie_embeddings": True,
    },
    "data": {"path": "data", "seq": 32, "micro_batch": 2, "global_batch": 4, "document_mask": True},
    "optim": {"steps": STEPS, "lr": 1e-2, "warmup": 2},
    "checkpoint": {"every": SAVED},
    "log": {"eval_every": 3, "eval_batches": 1},
    "cluster": {"device": "cpu"},
}  # fmt: skip
RUNS = {
    "dense": (),
    "experts": (
        "model.experts=4", "model.top_k=2", "model.expert_ffn=8", "model.balance_bias=0.01", "model.shared_experts=1",
        "parallel.dp=2", "parallel.ep=2", "parallel.strategy=fsdp2",
    ),
}  # fmt: skip


def train(rank: int, spec: RunSpec, folder: Path, stopped: bool) -> None:
    trainer = Trainer(spec, folder, quiet=True)
    if stopped:
        before_step(trainer, STOPPED + 1, crash)
    with contextlib.suppress(Crash):
        trainer.run()


def hashes(run: Path, step: int) -> dict[str, str]:
    tensors = saved(run, step)
    return {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16] for name, value in tensors.items()
    }


def main() -> None:
    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) for _ in range(80))
    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(["text.jsonl"], Path("data"), workers=1)
    specs = {name: RunSpec.from_dict(apply_overrides({"name": name, **COMMON}, keys)) for name, keys in RUNS.items()}
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].parallel.world):  # forks before threads exist
        for folder, stopped in ((Path(name), True), (Path("whole") / name, False)):
            if spec.parallel.world == 1:
                train(0, spec, folder, stopped)
            else:
                on_ranks(spec.parallel.world, train, spec, folder, stopped)
    expected: dict[str, Any] = {}
    for name in RUNS:
        whole = Path("whole") / name
        assert curve(whole)[:STOPPED] == curve(Path(name))
        keys = ("step", "loss", "lr", "grad_norm", "tokens", "val_loss")
        steps = [dict(zip(keys, line, strict=False)) for line in curve(whole)]
        expected[name] = {"steps": steps, "saved": hashes(Path(name), SAVED)}
        text = (Path(name) / "spec.toml").read_text()
        (Path(name) / "spec.toml").write_text(text.replace(str(Path("data").resolve()), "data"))
        for part in ("plots", "report.html", "watch", "hangs"):
            shutil.rmtree(Path(name) / part, ignore_errors=True)
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    shutil.rmtree("whole")
    Path("text.jsonl").unlink()


if __name__ == "__main__":
    main()
