"""A model of code from token shards: three sizes trained, a prediction made before the largest, and an evaluation.

    python benchmarks/code_corpus.py code                                     # the tokens, on another machine
    python benchmarks/code_model.py train 3m --tokens code/tokens --minutes 9     # until it says "finished"
    python benchmarks/code_model.py train 10m --tokens code/tokens --minutes 9
    python benchmarks/code_model.py predict --tokens code/tokens                  # before the large one is begun
    python benchmarks/code_model.py train 100m --tokens code/tokens --minutes 9   # again and again
    python benchmarks/code_model.py evaluate --tokens code/tokens --save

Every call of `train` goes on where the last one stopped, with the weights it would have had (SIGTERM saves a
checkpoint; a resumed run is bitwise the one that was not stopped). The spec is configs/code/100m-pretrain.toml; the
smaller sizes differ in shape and learning rate. The same path on a CPU, in minutes, with any tokens of `bpe:N+code`:

    lmworks data prepare src --glob '**/*.py' --tokenizer bpe:1024+code --val-fraction 0.1 --out tiny/python
    python benchmarks/code_model.py train 3m --tokens tiny --tiny      # and so on
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from common import write_result
from ngram_model import NgramModel

from lmworks import LLM
from lmworks.data import TokenData, load_tokenizer
from lmworks.evals import load_suite, run_suite
from lmworks.evals.engine_model import EngineModel
from lmworks.loading import trained_fim
from lmworks.record import RunFolder, read_metrics
from lmworks.spec import RunSpec, dump_toml
from lmworks.train.evaluate import evaluate as held_out_loss
from lmworks.train.evaluate import held_out
from lmworks.train.load_run import load_trained

SPEC = Path(__file__).parent.parent / "configs/code/100m-pretrain.toml"
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "3m": {"model": {"layers": 4, "hidden": 128, "heads": 2, "ffn": 352}, "optim": {"lr": 3e-3}},
    "10m": {"model": {"layers": 6, "hidden": 256, "heads": 4, "ffn": 704}, "optim": {"lr": 2e-3}},
    "100m": {},
}
TINY: dict[str, dict[str, Any]] = {
    "parallel": {"compile": False},
    "precision": {"dtype": "fp32"},
    "cluster": {"device": "cpu"},
    "model": {"heads": 2, "vocab": 1024, "context": 256},
    "data": {"seq": 256, "micro_batch": 1, "global_batch": 2, "workers": 0},
    "optim": {"lr": 3e-3},
    "checkpoint": {"every": 4},
    "log": {"eval_every": 8, "eval_batches": 2},
}
TINY_STAGE = {"steps": 12, "data": {"seq": 64, "micro_batch": 4, "global_batch": 8}}
ALPHA = 0.347  # of N: Chinchilla, refitted (Besiroglu et al. 2024)
PREEMPTED = 75  # saved, and to be resumed
AROUND = 2000  # characters before and after a gap


def spec_of(size: str, tokens: Path, tiny: bool) -> RunSpec:
    written = tomllib.loads(SPEC.read_text(encoding="utf-8"))
    shape = tomllib.loads((SPEC.parent / written.pop("extends")).read_text(encoding="utf-8"))
    table = merged(merged(shape, written), SIZES[size])
    if tiny:
        layers = 1 + list(SIZES).index(size)
        table = merged(table, TINY)
        table["model"] |= {"layers": layers, "hidden": 32 * layers, "ffn": 64 * layers}
        table["stages"] = [merged(table["stages"][0], TINY_STAGE), {**table["stages"][1], "steps": 4}]
    shares = {Path(name).name: share for name, share in table["data"]["mix"].items()}
    table["data"]["mix"] = {str(folder.resolve()): shares.get(folder.name, 0.2) for folder in languages(tokens)}
    table["name"] = f"code-{size}"
    return RunSpec.from_dict(table)


def merged(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    inner = {key: merged(table.get(key, {}), one) for key, one in changes.items() if isinstance(one, dict)}
    return {**table, **changes, **inner}


def languages(tokens: Path) -> list[Path]:
    found = sorted(path.parent for path in tokens.glob("*/index.json"))
    if not found:
        raise SystemExit(f"{tokens}: no tokens in it; one folder a language, as benchmarks/code_corpus.py makes them")
    return found


def train(size: str, work: Path, tokens: Path, minutes: float, tiny: bool) -> None:
    """One call's worth of training."""
    run = work / size
    if size == "100m" and not run.exists() and not (work / "prediction.json").exists():
        raise SystemExit("first: code_model.py predict; a prediction is made before what it predicts")
    words = ["resume", str(run)]
    if not run.exists():
        file = work / f"{size}.toml"
        file.write_text(dump_toml(spec_of(size, tokens, tiny).to_dict()), encoding="utf-8")
        words = ["train", str(file), "--run-dir", str(run)]
    job = subprocess.Popen([sys.executable, "-m", "lmworks", *words])
    try:
        code = job.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)
        code = job.wait()
    if code not in (0, PREEMPTED):
        raise SystemExit(code)
    print(json.dumps({"size": size, "finished": code == 0, **progress(run)}))


def progress(run: Path) -> dict[str, Any]:
    steps = list(read_metrics(RunFolder.open(run).metrics_path))
    losses = [[step["step"], step["val_loss"]] for step in steps if step.get("val_loss")]
    speeds = sorted(step["tokens_per_s"] for step in steps if step.get("tokens_per_s"))
    return {
        "step": steps[-1]["step"] if steps else 0,
        "tokens/s, median": round(speeds[len(speeds) // 2]) if speeds else None,
        "attempts": len({step.get("attempt", 0) for step in steps}),
        "held-out loss by step": losses,
    }


def predict(work: Path, tokens: Path, tiny: bool) -> None:
    """Loss of the large model from those of two smaller ones on the same tokens: E + A / N^α, α from a published law.

    What the number of tokens adds is the same for all three, and in E."""
    place = work / "prediction.json"
    if place.exists() or (work / "100m").exists():
        raise SystemExit(f"{place} is there, or the run is: a prediction is made once, and before")
    sizes = {size: spec_of(size, tokens, tiny).model.params for size in SIZES}
    one, other = ((sizes[size], last_loss(work / size)) for size in ("3m", "10m"))
    scale = (one[1] - other[1]) / (one[0] ** -ALPHA - other[0] ** -ALPHA)
    loss = other[1] - scale * (other[0] ** -ALPHA - sizes["100m"] ** -ALPHA)
    found = {"alpha": ALPHA, "parameters": sizes, "3m": one[1], "10m": other[1], "100m": loss, "made": time.ctime()}
    place.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def last_loss(run: Path) -> float:
    losses = progress(run)["held-out loss by step"] if run.exists() else []
    if not losses:
        raise SystemExit(f"{run}: not trained yet")
    return float(losses[-1][1])


def gaps(folders: list[Path], each: int) -> list[dict[str, Any]]:
    """The rest of a line, cut anywhere, of held-out files, in SAFIM's form; as many of each language."""
    rows = []
    for folder in folders:
        data, tokenizer, draw = TokenData.open(folder, "val"), load_tokenizer(folder), random.Random(folder.name)
        starts = [0, *data.document_starts(1, len(data)).tolist(), len(data)]
        documents = list(range(len(starts) - 1))
        draw.shuffle(documents)
        made = 0
        for number in documents:
            ids = [token for token in data.read(starts[number], starts[number + 1]).tolist() if token != tokenizer.eot]
            text = tokenizer.decode(ids)
            lines = [at for at in range(len(text)) if text[at] != "\n" and (not at or text[at - 1] == "\n")]
            if not lines or "{{completion}}" in text:
                continue
            start = draw.choice(lines)
            end = text.find("\n", start) if "\n" in text[start:] else len(text)
            cut = draw.randint(start, end - 1)
            if not text[cut:end].strip():
                continue
            shown = f"{text[max(0, cut - AROUND) : cut]}{{{{completion}}}}{text[end : end + AROUND]}"
            row = {"task_id": f"{folder.name}/{number}", "prompt": shown, "eval_prompt": "{{completion}}"}
            rows.append({**row, "ground_truth": text[cut:end], "lang": f"{folder.name}"})
            made += 1
            if made == each:
                break
    return rows


def evaluate(work: Path, tokens: Path, each: int, ngram_tokens: int, save: bool) -> None:
    folders = languages(tokens)
    (work / "gaps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gaps(folders, each)))
    suite_file = {"format": "safim", "data": "gaps.jsonl", "metrics": ["exact", "edit"]}
    asked = {"max_tokens": 64, "stop": ["\n"]}
    (work / "gaps.toml").write_text(dump_toml({**suite_file, "generation": asked}), encoding="utf-8")
    suite = load_suite(str(work / "gaps.toml"))
    found: dict[str, Any] = {}
    if (work / "prediction.json").exists():
        found["prediction"] = json.loads((work / "prediction.json").read_text())
    found["n-gram"] = scores(run_suite(NgramModel(folders, ngram_tokens), suite, work / "evals/n-gram"))
    for size in SIZES:
        run = work / size
        if not run.exists():
            continue
        with LLM(run) as llm:
            model = EngineModel(llm, {"model": size}, fim=trained_fim(run))
            infilled = scores(run_suite(model, suite, work / f"evals/{size}"))
        found[size] = {**progress(run), "infilling": infilled, "held-out loss": losses_by_language(run, folders)}
        print(size, json.dumps(found[size]), flush=True)
    print(json.dumps({name: found[name] for name in ("prediction", "n-gram") if name in found}))
    if save:
        print(write_result("code_model", found))


def scores(result: dict[str, Any]) -> dict[str, Any]:
    metrics = {
        name: [round(one[key], 4) for key in ("value", "low", "high")] for name, one in result["metrics"].items()
    }
    return {"problems": result["problems"], **metrics, "exact by language": result["groups"]}


def losses_by_language(run: Path, folders: list[Path]) -> dict[str, float]:
    """Left to right, in nats a token."""
    trained = load_trained(run)
    found = {}
    for folder in folders:
        data = trained.spec.data.replace(mix={}, path=str(folder.resolve()))
        spec = trained.spec.replace(data=data, stages=[])
        found[folder.name] = round(held_out_loss(trained.model, held_out(spec), spec, 50).loss, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "predict", "evaluate"))
    parser.add_argument("size", nargs="?", choices=tuple(SIZES))
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("code-model"))
    parser.add_argument("--minutes", type=float, default=9, help="of one call; then it saves")
    parser.add_argument("--gaps", type=int, default=200, help="of each language")
    parser.add_argument("--ngram-tokens", type=int, default=60_000_000)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    if options.what == "train":
        if options.size is None:
            parser.error(f"train which? One of {', '.join(SIZES)}")
        train(options.size, options.work, options.tokens, options.minutes, options.tiny)
    elif options.what == "predict":
        predict(options.work, options.tokens, options.tiny)
    else:
        evaluate(options.work, options.tokens, options.gaps, options.ngram_tokens, options.save)


if __name__ == "__main__":
    main()
