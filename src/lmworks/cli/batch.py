"""`lmworks batch`: the requests of a file, by engines of this process or by a server."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ..data.progress import activity
from ..spec.errors import SpecError
from . import options
from .loading import loading
from .output import Json, print_json, write
from .serve import KEY, check_files, import_server, make_serving, parse_sources, read_parsers, read_templates


def batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests as OpenAI's batches have them, one a line.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL|NAME=MODEL]... [engine.KEY=VALUE]...",
            help="Run folders, Hugging Face folders or presets, as `lmworks serve` has them.",
            autocompletion=options.models_and_engine,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where results go. [default: FILE with .results.jsonl]")
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help=f"A server to ask, instead of models (its key: {KEY}).")
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Lines at once. [default: what the engine holds; 64 of a server]")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of which [limits] are read (docs/serving.md).")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter of the (only) model.")
    ] = None,
    chat_template: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]FILE", help="A Jinja chat template (of the model NAME).")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of a run: the checkpoint of this step, not the newest.")] = None,
    seed: Annotated[int, typer.Option(help="Of requests that bring none, and of a preset's random weights.")] = 0,
    json: Json = False,
) -> None:
    """Run a file of requests in OpenAI's batch format.

    \b
    Examples:
      lmworks batch work.jsonl exported/demo engine.max_seqs=64
      lmworks batch work.jsonl --server http://127.0.0.1:8000 --in-flight 128 -o answers.jsonl
    \b
    A line of FILE:
      {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "def "}}
    """
    names, engine_options = parse_sources(sources or [])
    if bool(names) == (server is not None):
        raise SpecError("name a model, or --server URL: one of them")
    if server is not None and (engine_options or adapter or chat_template or config):
        raise SpecError("engine.KEY=VALUE, --adapter, --chat-template and --config are for models, not for --server")
    if adapter and len(names) != 1:
        raise SpecError("--adapter is of one model: name one")
    check_files(file, config)
    templates = read_templates(chat_template or [], names)
    import_server()
    from ..serve.batches.run_file import FileBatch, run_against, run_here
    from ..serve.limits import Limits

    began, output = time.monotonic(), output or file.with_suffix(".results.jsonl")
    serving = make_serving(
        names, engine_options, step, seed, adapter or [], templates, read_parsers([], [], names), [], config, []
    )
    if serving.settings.current().keys:
        raise SpecError(f"{config}: keys are for servers; a batch reads [limits] alone")
    limits = serving.settings.current().limits if server is None else Limits()
    adapters = [one.partition("=")[0] for one in adapter or ()]
    asked = {"models": names, "engine": engine_options, "adapters": adapter or [], "step": step, "seed": seed}
    work = FileBatch(file, output, asked if server is None else None, [*names, *adapters] if names else None, limits)
    try:
        with activity() as doing:
            if server is None:
                for source in names.values():
                    doing(loading(source, step), 0, 0)
                asyncio.run(run_here(work, serving, in_flight, doing))
            else:
                asyncio.run(run_against(work, server, os.environ.get(KEY), in_flight, doing))
    except BaseException:
        work.close()
        raise
    summary = replace(work.finish(), seconds=round(time.monotonic() - began, 3))
    if json:
        print_json(asdict(summary))
    else:
        write(
            f"{output}: {summary.completed} of {summary.lines} lines completed, {summary.failed} failed "
            f"({summary.prompt_tokens} + {summary.completion_tokens} tokens, {summary.seconds:.1f} s)"
        )
    if summary.failed:
        raise typer.Exit(1)
