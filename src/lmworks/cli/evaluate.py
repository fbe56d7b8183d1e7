"""`lmworks eval`: a trained run measured."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from ..data.progress import activity
from .generate import Step
from .loading_text import loading
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
    from ..train.load_run import load_trained

    with activity() as doing:
        doing(loading(run, step), 0, 0)
        trained = load_trained(run, step)
        data = held_out(trained.spec)
        doing("measuring the loss on held-out data", 0, 0)
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
