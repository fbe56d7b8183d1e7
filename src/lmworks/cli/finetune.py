"""`lmworks finetune`: post-training of a model folder in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..data.progress import activity
from ..spec import SpecError
from ..spec.align import METHODS
from ..spec.errors import did_you_mean
from .options import Force, OnDevice, Overrides, on_device
from .output import Json
from .train import MaxRestarts, start_run


def finetune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a run folder.")],
    overrides: Overrides = None,
    data: Annotated[
        str, typer.Option("--data", help="Examples: a .jsonl, .json or .parquet file, or a folder of those.")
    ] = "",
    method: Annotated[str, typer.Option("--method", help=f"One of: {', '.join(METHODS)}.")] = "sft",
    lora: Annotated[
        int | None, typer.Option("--lora", metavar="RANK", help="Train adapters of this rank (without: all weights).")
    ] = None,
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over the examples.")] = 1.0,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where the run is kept (by default runs/MODEL-METHOD).")
    ] = None,
    max_restarts: MaxRestarts = None,
    device: OnDevice = "",
    force: Force = False,
    json: Json = False,
) -> None:
    """Fine-tune a model on conversations, preferences or prompts.

    \b
    Examples:
      lmworks finetune hf/llama --data chats.jsonl
      lmworks finetune hf/llama --data chats.jsonl --lora 16 optim.lr=1e-4
      lmworks finetune hf/llama --data pairs.jsonl --method dpo align.beta=0.05
      lmworks finetune runs/tiny --data sums.jsonl --method grpo 'align.rewards=["numeric"]'
    """
    if not data:
        raise SpecError("--data is missing: name a file of examples, e.g. --data chats.jsonl")
    if method not in METHODS:
        raise SpecError(f"--method {method}: there is no such method{did_you_mean(method, METHODS)}")
    if lora is not None and lora < 1:
        raise SpecError(f"--lora {lora}: a rank is 1 or more, e.g. 16; without --lora all weights are trained")
    if epochs <= 0:
        raise SpecError(f"--epochs {epochs:g}: must be more than 0")
    from ..align.finetune import finetune_spec

    changes = [*(overrides or ()), *on_device(device)]
    with activity() as doing:
        spec = finetune_spec(model, data, method, lora or 0, epochs, changes, doing)
    options = ["--data", data, "--method", method, "--epochs", str(epochs), *(["--lora", str(lora)] if lora else [])]
    start_run(spec, ["finetune", model, *(overrides or ()), *options], run_dir, max_restarts, device, force, json)
