"""`lmworks checkpoint`: list, show, verify, export and prune the checkpoints of a run; merge adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..data.progress import Progress, console_progress
from ..record.formatting import binary_bytes
from ..spec import ParallelSpec
from ..spec.errors import CheckpointError, SpecError
from .generate import Step
from .groups import CommandGroup
from .options import parse_bytes
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..checkpoint.format.survey import Contents, VerifyResult

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, help="List, verify, export and prune checkpoints."
)

Source = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or a folder of checkpoints, or one of them.")
]
MaxShardSize = Annotated[str, typer.Option("--max-shard-size", help="The largest file of weights, e.g. 500MB or 2GiB.")]


@app.command()
def ls(source: Source, json: Json = False) -> None:
    """List checkpoints, the newest first, and unfinished saves.

    Sizes are compared with what was saved; `verify` reads the contents too.

    \b
    Examples:
      lmworks checkpoint ls runs/tiny
      lmworks checkpoint ls runs/tiny/checkpoints --json
    """
    from ..checkpoint.format.survey import list_checkpoints, locate

    place = locate(source)
    found = list_checkpoints(place.root)
    if json:
        print_json([{**asdict(one), "folder": str(one.folder)} for one in found])
        return
    columns = ["folder", "step", "saved", "size", "files", "ranks", "status"]
    rows = [
        [one.folder.name, one.step, one.time, binary_bytes(one.bytes), one.files, one.ranks or "-", one.status]
        for one in found
    ]
    print_table("", columns, rows, drop=("files", "ranks"))
    for one in found:
        if one.reason:
            typer.echo(f"{one.folder.name}: {one.reason}", err=True)


@app.command()
def show(
    source: Source,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: Json = False,
) -> None:
    """Show what a checkpoint holds, by default the newest.

    \b
    Examples:
      lmworks checkpoint show runs/tiny
      lmworks checkpoint show runs/tiny --step 100 --tensors
      lmworks checkpoint show runs/tiny --tensors --json
    """
    from ..checkpoint.format.survey import contents, locate

    held = contents(locate(source).choose(step))
    if json:
        summary = {**asdict(held), "folder": str(held.folder), "bytes": held.bytes, "ranks": held.ranks}
        print_json(summary if tensors else {key: value for key, value in summary.items() if key != "tensors"})
    else:
        print_contents(held, tensors)


@app.command()
def verify(source: Source, step: Step = None, json: Json = False) -> None:
    """Verify the digests of every file; exit code 1 if damaged.

    Without --step all checkpoints are verified, and the step is named from which a run would resume.

    \b
    Examples:
      lmworks checkpoint verify runs/tiny
      lmworks checkpoint verify runs/tiny --step 100 --json
    """
    from ..checkpoint.format.folders import folders
    from ..checkpoint.format.survey import locate, verify_all

    place = locate(source)
    one = place.step if step is None else step
    with progress_unless(json) as progress:
        verdicts = verify_all(folders(place.root) if one is None else [place.choose(one)], progress)
    good = [verdict.step for verdict in verdicts if verdict.status == "intact"]
    damaged = [verdict for verdict in verdicts if verdict.status == "damaged"]
    if json:
        found = [{**asdict(verdict), "folder": str(verdict.folder)} for verdict in verdicts]
        print_json({"ok": not damaged, "resume": good[0] if one is None and good else None, "checkpoints": found})
    else:
        for verdict in verdicts:
            print_verdict(verdict)
        if one is None:
            typer.echo(f"a run would resume from step {good[0]}" if good else "there is no step to resume from")
    if damaged:
        raise typer.Exit(1)


@app.command()
def export(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or that of an earlier export.")],
    step: Step = None,
    max_shard_size: MaxShardSize = "5GB",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with lora.rank: the adapter alone, in PEFT's format.")
    ] = False,
    json: Json = False,
) -> None:
    """Export a run as a Hugging Face folder.

    Adapters are merged into their base. The layout that the run was trained under does not matter. Weights go from the
    checkpoint to the files one at a time, so that a model of any size can be exported on a small machine.

    \b
    Examples:
      lmworks checkpoint export runs/tiny exported/tiny
      lmworks checkpoint export runs/tiny exported/tiny-100 --step 100 --max-shard-size 2GB --json
      lmworks checkpoint export runs/lora exported/adapter --adapter
    """
    from ..train.export import export as write

    limit = parse_bytes(max_shard_size, "--max-shard-size")
    with progress_unless(json) as progress:
        written = write(source, out, step, shard_bytes=limit, progress=progress, adapter=adapter)
    if json:
        summary = {"run": str(source), "out": str(out), "step": written.step, "params": written.params}
        print_json({**summary, "files": written.files, "tokenizer": written.tokenizer})
    else:
        without = "" if written.tokenizer else " (no tokenizer.json: its data are bytes)"
        typer.echo(f"step {written.step}: {written.params:,} parameters in {out}{without}")


@app.command()
def merge(
    base: Annotated[Path, typer.Argument(metavar="HF_FOLDER", help="The base model.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A LoRA or DoRA adapter in PEFT's format.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    max_shard_size: MaxShardSize = "5GB",
    json: Json = False,
) -> None:
    """Merge an adapter of PEFT's format into a Hugging Face folder.

    \b
    Examples:
      lmworks checkpoint merge hf/llama exported/adapter exported/merged
      lmworks checkpoint merge hf/llama exported/adapter exported/merged --max-shard-size 2GB --json
    """
    from ..model.merge import merge_peft

    limit = parse_bytes(max_shard_size, "--max-shard-size")
    with progress_unless(json) as progress:
        files = merge_peft(base, adapter, out, limit, lambda done, total: progress("merge", done, total))
    if json:
        print_json(
            {"base": str(base), "adapter": str(adapter), "out": str(out), "files": [file.name for file in files]}
        )
    else:
        typer.echo(f"{base} with {adapter} in {out}")


@app.command()
def prune(
    source: Source,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest to keep.")],
    keep_every: Annotated[
        int, typer.Option("--keep-every", min=0, help="Keep steps that this divides, too (0: none).")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    json: Json = False,
) -> None:
    """Remove old checkpoints and unfinished saves.

    The newest intact checkpoint is never removed.

    \b
    Examples:
      lmworks checkpoint prune runs/tiny --keep 2 --dry-run
      lmworks checkpoint prune runs/tiny --keep 2 --keep-every 1000 --json
    """
    from ..checkpoint.format.folders import RetentionPolicy, committed, discard, prunable
    from ..checkpoint.format.survey import locate, size_of

    place = locate(source)
    if place.step is not None:
        raise SpecError(f"{source} is one checkpoint; name the run, or the folder that holds all of them")
    if place.run and place.run.is_locked():
        raise SpecError(f"{place.run.path} is being trained, and prunes by itself as checkpoint.keep says")
    # Finding prunable checkpoints reads files, which takes a while: the run must not be resumed meanwhile.
    with place.run.locked() if place.run and not dry_run else nullcontext():
        doomed = {folder: size_of(folder) for folder in prunable(place.root, RetentionPolicy(keep, keep_every))}
        for folder in () if dry_run else doomed:
            discard(folder)
            if folder.exists():
                raise CheckpointError(f"cannot remove {folder}: no permission, or a file in it is in use")
    kept = [folder.name for folder in committed(place.root) if folder not in doomed]
    if json:
        removed = [{"folder": str(folder), "bytes": size} for folder, size in doomed.items()]
        print_json({"removed": removed, "freed": sum(doomed.values()), "kept": kept, "dry_run": dry_run})
    else:
        print_pruned(doomed, kept, "would remove" if dry_run else "removed")


def print_contents(held: Contents, tensors: bool) -> None:
    usual = ParallelSpec().to_dict()
    layout = [f"{key}={value}" for key, value in held.parallel.items() if value != usual.get(key)]
    typer.echo(f"{held.folder}: step {held.step}, {binary_bytes(held.bytes)}")
    typer.echo(f"saved {held.time} with torch {held.torch} by {held.ranks} rank{'s' if held.ranks > 1 else ''}")
    typer.echo(f"layout: {', '.join(layout) or 'one rank'}; data cursor: {held.cursor}")
    sections = [[name, one["tensors"], binary_bytes(one["bytes"])] for name, one in held.sections.items()]
    print_table("", ["section", "tensors", "size"], sections)
    files = [[name, one["rank"], binary_bytes(one["bytes"])] for name, one in held.files.items()]
    print_table("", ["file", "rank", "size"], files)
    if tensors:
        rows = [
            [one.name, one.dtype, " × ".join(map(str, one.shape)) or "-", one.pieces, binary_bytes(one.bytes)]
            for one in held.tensors
        ]
        print_table("", ["tensor", "type", "shape", "pieces", "size"], rows, drop=("pieces",))


def print_verdict(verdict: VerifyResult) -> None:
    if verdict.status == "intact":
        typer.echo(f"{verdict.folder.name}: intact ({verdict.files} files, {binary_bytes(verdict.bytes)})")
    elif verdict.status == "unfinished":
        typer.echo(f"{verdict.folder.name}: never finished; nothing loads it")
    for wrong in verdict.wrong:
        typer.echo(f"{verdict.folder.name}: {wrong.reason}")


def print_pruned(doomed: dict[Path, int], kept: list[str], did: str) -> None:
    for folder, size in doomed.items():
        typer.echo(f"{did} {folder.name} ({binary_bytes(size)})")
    stays = ", ".join(kept) or "none"
    count = f"{len(doomed)} folder{'' if len(doomed) == 1 else 's'}"
    typer.echo(f"{did} {count}, {binary_bytes(sum(doomed.values()))}; kept: {stays}")


@contextmanager
def progress_unless(json: bool) -> Iterator[Progress]:
    """A progress bar in megabytes, for more than a gigabyte."""
    with console_progress() as console:

        def draw(stage: str, done: int, total: int) -> None:
            if total >= 10**9 and not json:
                console(f"{stage} (MB)", done // 10**6, total // 10**6)

        yield draw
