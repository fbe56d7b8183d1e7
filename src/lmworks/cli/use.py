"""`lmworks eval`, `lmworks generate` and `lmworks export`: a trained run at work."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .output import Json, print_json
from .train import RunDir

Step = Annotated[int | None, typer.Option("--step", help="Use the checkpoint of this step instead of the newest.")]


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


def generate(
    run: RunDir,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="How many tokens to add.")] = 64,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    temperature: Annotated[float, typer.Option(help="Below 1: safer; above 1: wilder; 0: greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Choose among the k likeliest (0: all).")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Choose among the likeliest that hold this mass.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    step: Step = None,
    json: Json = False,
) -> None:
    """Continue a text with a trained run (or a Hugging Face folder with a tokenizer.json).

    \b
    Examples:
      lmworks generate runs/demo --prompt "def add(a, b):" --max-tokens 48 --greedy
      lmworks generate runs/demo --prompt "import " --temperature 0.8 --top-k 50 --seed 7
    """
    import torch

    from ..model import Sampling
    from ..model.generation import stream
    from ..spec import SpecError
    from ..train.load import load_for_generation

    how = Sampling(0.0 if greedy else temperature, top_k, top_p, seed)
    if not prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in prompt):
        raise SpecError("--prompt is not valid UTF-8")
    model, tokenizer = load_for_generation(run, step)
    how = replace(how, vocab=tokenizer.vocab_size)
    ids = tokenizer.encode(prompt) or [tokenizer.eot]
    outside = [i for i in ids if i >= model.spec.vocab]
    if outside:
        raise SpecError(
            f"the tokenizer gives id {outside[0]}, but the model's vocabulary ends at {model.spec.vocab - 1}"
        )
    tokens = torch.tensor([ids], device=model.device)
    new: list[int] = []
    shown = ""
    for number, token in enumerate(stream(model, tokens, max_tokens, how)):
        if not json and number == 0:  # not before: a prompt that is too long is refused by now
            typer.echo(prompt, nl=False)
        if int(token) == tokenizer.eot:
            break
        new.append(int(token))
        text = tokenizer.decode(new)
        if not json and not text.endswith("\ufffd"):  # half of a character waits for its other half
            typer.echo(text[len(shown) :], nl=False)
            shown = text
    text = tokenizer.decode(new)
    if json:
        print_json({"prompt": prompt, "text": text, "tokens": new, "prompt_tokens": len(ids)})
    else:
        typer.echo(text[len(shown) :])


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
