"""`lmworks eval` and `lmworks export`: a trained run measured, and written for others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from .generate import Step
from .output import Json, print_json
from .train import RunDir


def evaluate(
    run: RunDir,
    step: Step = None,
    batches: Annotated[int, typer.Option("--batches", min=0, help="Micro-batches to use (0: all held-out data).")] = 0,
    json: Json = False,
) -> None:
    """Measure the loss of a run on its held-out data.

    \b
    Examples:
      lmworks eval runs/tiny
      lmworks eval runs/tiny --step 100 --json
    """
    from ..train.evaluate import evaluate as measure
    from ..train.evaluate import held_out
    from ..train.load import load_trained

    trained = load_trained(run, step)
    data = held_out(trained.spec)
    result = measure(trained.model, data, trained.spec, batches)
    bits_per_byte = result.loss / math.log(2) / data.bytes_per_token
    summary = {
        "run": str(run),
        "step": trained.step,
        "loss": result.loss,
        "perplexity": math.exp(min(result.loss, 700)),
        "bits_per_byte": bits_per_byte,
        "tokens": result.tokens,
    }
    if json:
        print_json(summary)
    else:
        typer.echo(
            f"step {trained.step}: loss {result.loss:.4f} nats/token, perplexity {summary['perplexity']:.2f}, "
            f"{bits_per_byte:.3f} bits/byte over {result.tokens:,} held-out tokens"
        )


def export(
    run: RunDir,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or that of an earlier export.")],
    step: Step = None,
    json: Json = False,
) -> None:
    """Write a run as a Hugging Face folder, which `transformers` and others load.

    The layout that the run was trained under does not matter.

    \b
    Examples:
      lmworks export runs/tiny exported/tiny
      lmworks export runs/tiny exported/tiny-100 --step 100 --json
    """
    from ..train.export import export as write

    written = write(run, out, step)
    if json:
        summary = {"run": str(run), "out": str(out), "step": written.step, "params": written.params}
        print_json({**summary, "tokenizer": written.tokenizer})
    else:
        without = "" if written.tokenizer else " (no tokenizer.json: its data are bytes)"
        typer.echo(f"step {written.step}: {written.params:,} parameters in {out}{without}")
