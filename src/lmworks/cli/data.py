"""`lmworks data`: curate documents, prepare token shards from text, and inspect them."""

from __future__ import annotations

import codecs
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..record import RunFolder
from ..spec.align import PROMPTS
from ..spec.errors import SpecError
from .data_curate import curate
from .data_mix import fit_mix, mix
from .data_quality import quality
from .groups import CommandGroup
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..data.loader import BatchSource
    from ..data.preview import Preview
    from ..data.survey import Survey
    from ..data.window import Row

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, help="Prepare and inspect training data."
)
app.command()(curate)
app.command()(quality)
app.command()(mix)
app.command("fit-mix")(fit_mix)


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Text files, .jsonl, .parquet, folders of source files, stdlib, or hf:NAME[:CONFIG][:SPLIT].",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, bpe:N or bpe:N+code (trained on the sources), or a tokenizer.json.")
    ] = "bytes",
    val_fraction: Annotated[float, typer.Option(help="Share of the documents to hold out.")] = 0.05,
    workers: Annotated[int, typer.Option(help="Processes; 0: one a core. The result does not depend on it.")] = 0,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    glob: Annotated[str, typer.Option(help="Which files of a folder to take.")] = "**/*",
    separator: Annotated[
        str, typer.Option(help=r"Cuts text files into documents, e.g. '\n\n' or '<|endoftext|>'.")
    ] = "",
    repositories: Annotated[
        bool, typer.Option(help="Each folder in a source folder is one document, a repository; needs bpe:N+code.")
    ] = False,
    metadata_dropout: Annotated[
        float, typer.Option(help="With --repositories: share of them without names and paths.")
    ] = 0.5,
    eot: Annotated[str, typer.Option(help="End-of-text token of a tokenizer.json, if it has an unusual name.")] = "",
    json: Json = False,
) -> None:
    """Turn text into memory-mapped token shards, in parallel.

    Killed in the middle, it continues where it was; run again, it does nothing unless something changed.

    \b
    Examples:
      lmworks data prepare stdlib --tokenizer bpe:4096 --out data/stdlib
      lmworks data prepare src/ docs/ --glob '**/*.py' --out data/code
      lmworks data prepare repositories/ --repositories --tokenizer bpe:32768+code --out data/repositories
      lmworks data prepare shakespeare.txt --separator '\\n\\n' --out data/plays
      lmworks data prepare a.jsonl b.parquet --tokenizer gpt2/tokenizer.json --out data/web
      lmworks data prepare hf:HuggingFaceFW/fineweb:sample-10BT --tokenizer bpe:32768 --out data/fineweb
    """
    from ..data import Reading, console_progress
    from ..data import prepare as run

    reading = Reading(
        text_field,
        glob,
        unescaped(separator),
        repositories=repositories,
        metadata_dropout=metadata_dropout,
    )
    try:
        with console_progress() as progress:
            done = run(
                sources,
                out,
                tokenizer,
                val_fraction=val_fraction,
                workers=workers,
                progress=progress,
                reading=reading,
                eot=eot,
            )
    except KeyboardInterrupt:
        typer.echo("lmworks: interrupted; run the same command again to continue", err=True)
        raise typer.Exit(130) from None
    index = done.index
    splits = {s: {"documents": index.documents(s), "tokens": index.tokens(s)} for s in index.splits}
    if json:
        result = {"folder": str(out), "up_to_date": done.up_to_date, "tokenizer": index.tokenizer}
        print_json({**result, "vocab_size": index.vocab_size, "splits": splits, "dropped": index.dropped})
        return
    if done.unreadable:
        typer.echo(f"{len(done.unreadable)} files are not UTF-8 text and were left out, e.g. {done.unreadable[0]}")
    for name, split in splits.items():
        typer.echo(f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens")
    typer.echo(f"{out} is up to date, nothing to do" if done.up_to_date else f'{out} is ready: data.path = "{out}"')


def unescaped(separator: str) -> str:
    r"""A shell passes \n as two characters; here it means a new line."""
    try:
        return codecs.decode(separator.encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError as error:
        raise SpecError(f"--separator {separator!r}: {error.reason}; write a backslash as \\\\") from None


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A prepared folder, or stdlib:TOKENIZER.")],
    samples: Annotated[int, typer.Option(min=0, help="Documents to show the beginning of.")] = 3,
    json: Json = False,
) -> None:
    """Verify the checksums of shards, and describe them.

    \b
    Examples:
      lmworks data inspect stdlib:bytes
      lmworks data inspect data/code --samples 0 --json
    """
    from ..data import console_progress, resolve
    from ..data.survey import survey

    with console_progress() as progress:
        folder = resolve(path, progress)
    result = survey(folder, samples)
    if json:
        print_json(dataclasses.asdict(result))
    else:
        print_survey(result)


def print_survey(result: Survey) -> None:
    typer.echo(f"{result.folder}: every shard matches its checksum")
    typer.echo(f"sources: {', '.join(result.sources)}")
    typer.echo(f"tokenizer: {result.tokenizer}, {result.vocab_size:,} tokens, stored as {result.dtype}")
    typer.echo("left out: " + ", ".join(f"{count:,} {why}" for why, count in result.dropped.items()))
    splits = result.splits.items()
    sizes = [[n, s.shards, f"{s.documents:,}", f"{s.tokens:,}", f"{s.file_bytes / 1e6:.1f}"] for n, s in splits]
    print_table("Size", ["split", "shards", "documents", "tokens", "MB"], sizes)
    content = [[n, f"{s.bytes_per_token:.2f}", f"{s.entropy_bits:.2f}", f"{s.used_vocab:,}"] for n, s in splits]
    print_table("Tokens", ["split", "bytes of text each", "entropy in bits", "different ones"], content)
    lengths = [[n, *(f"{tokens:,}" for tokens in s.document_tokens.values())] for n, s in splits]
    print_table("Tokens in a document", ["split", *next(iter(result.splits.values())).document_tokens], lengths)
    repeats = [[n, f"{s.duplicate_documents:,}", f"{s.repeated_spans:.2%}"] for n, s in splits]
    print_table("Repetition", ["split", "duplicate documents", "32-token passages seen before"], repeats)
    if result.val_spans_in_train is not None:
        typer.echo(
            f"Of val, {result.val_spans_in_train:.2%} of the 32-token passages and {result.shared_documents} documents "
            "are in train too.\n"
        )
    top = [[t.id, repr(t.text), f"{t.count:,}", f"{t.share:.2%}"] for t in result.splits["train"].top_tokens]
    print_table("Most frequent tokens of train", ["id", "text", "count", "share"], top)
    for number, text in enumerate(result.samples, 1):
        typer.echo(f"─── sample {number} ───\n{text}\n")


@app.command()
def preview(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="Examples: .jsonl, .json, .parquet, or a folder of them.")
    ],
    model: Annotated[
        str, typer.Option("--model", help="The Hugging Face or run folder to be trained, or bytes.")
    ] = "bytes",
    chat_template: Annotated[str, typer.Option(help="A Jinja file instead of the model's template.")] = "",
    seq: Annotated[int, typer.Option(min=0, help="Count examples that are longer (0: none is too long).")] = 0,
    examples: Annotated[int, typer.Option(min=0, help="How many to show.")] = 3,
    line: Annotated[int, typer.Option(min=0, help="Show that of one line instead.")] = 0,
    json: Json = False,
) -> None:
    """Show examples of post-training, with the trained tokens marked.

    What is trained stands between ⟦ and ⟧. Every example is read, and what cannot be used is counted by its reason.

    \b
    Examples:
      lmworks data preview chats.jsonl --model exported/demo
      lmworks data preview pairs.jsonl --model runs/demo --line 7
      lmworks data preview chats.jsonl --seq 2048 --examples 0 --json
    """
    from ..data import console_progress
    from ..data.preview import preview as run

    with console_progress() as progress:
        found = run(path, model, chat_template=chat_template, seq=seq, count=examples, line=line, progress=progress)
    if json:
        print_json(dataclasses.asdict(found))
    else:
        print_preview(found)


def print_preview(found: Preview) -> None:
    for example in found.examples:
        names = ("chosen", "rejected") if len(example.sequences) > 1 else ("",)
        for name, parts in zip(names, example.sequences, strict=True):
            tokens = sum(part.tokens for part in parts)
            trained = sum(part.tokens for part in parts if part.trained)
            typer.echo(f"─── {example.place}{f', {name}' if name else ''}: {tokens:,} tokens, {trained:,} trained ───")
            typer.echo("".join(f"⟦{part.text}⟧" if part.trained else part.text for part in parts) + "\n")
    report = found.report
    share = report.trained_tokens / max(1, report.tokens)
    typer.echo(
        f"{report.path}: {report.examples:,} examples ({found.kind}), {report.tokens:,} tokens, {share:.1%} trained"
    )
    if report.split_conversations:
        typer.echo(
            f"{report.split_conversations:,} conversations became several examples: the template shows earlier turns "
            "in another way"
        )
    for reason, count in report.left_out.items():
        typer.echo(f"left out: {count:,} {reason}")
    for one in report.first_left_out:
        typer.echo(f"  {one}")


@app.command()
def window(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    cursor: Annotated[int, typer.Option(min=0, help="Where in the data: the `cursor` of an event.")],
    text: Annotated[int, typer.Option(min=0, help="Characters of each sequence to show (0: none).")] = 60,
    json: Json = False,
) -> None:
    """Show the sequences of one global batch and their sources.

    Of an online method these are the prompts of the round, all that it may draw.

    Outliers come first: sequences with far fewer bits a token than usual (repetition) or far more (noise, another
    language). They are the most frequent cause of loss spikes.

    \b
    Examples:
      lmworks data window runs/tiny --cursor 120
      lmworks data window runs/tiny --cursor 120 --text 400
      lmworks data window runs/tiny --cursor 120 --json
    """
    from ..align.prompts import open_prompts
    from ..data import open_batches
    from ..data.window import describe, rows_at, text_of, usual_bits

    spec = RunFolder.open(run).spec().after(cursor)
    data = spec.data.replace(verify=False)
    batches: BatchSource
    if data.kind == PROMPTS:
        batches, _ = open_prompts(spec.replace(data=data))
    else:
        batches = open_batches(data, spec.checkpoint.init, seed=spec.seed, world=spec.parallel.dp)
    usual, _ = usual_bits(batches, cursor)
    rows = sorted(rows_at(batches, cursor), key=lambda row: -abs(row.entropy_bits - usual))
    texts = [text_of(batches, row) for row in rows]
    if json:
        sequences = [{**dataclasses.asdict(row), "text": one} for row, one in zip(rows, texts, strict=True)]
        print_json({"run": str(run), "cursor": cursor, "rows": sequences})
        return
    whole = describe(batches, cursor)
    first, last = whole["samples"]
    typer.echo(
        f"cursor {cursor}: samples {first:,} to {last:,}, {whole['entropy_bits']:.2f} bits a token (usual: {usual:.2f})"
    )
    for source, count in whole["sources"].items():
        typer.echo(f"{count} from {source}")
    pieces = "lines" if rows[0].examples else "documents"
    head = ["sample", "window", pieces, "entropy in bits", "top token", "its share", "repeated"]
    cells = [
        [
            row.sample,
            row.window,
            lines_of(row) if row.examples else f"{row.documents[0]} to {row.documents[1]}",
            f"{row.entropy_bits:.2f}",
            row.top_token,
            f"{row.top_share:.1%}",
            f"{row.repeated:.1%}",
            *([repr(one[:text])] if text else []),
        ]
        for row, one in zip(rows, texts, strict=True)
    ]
    columns = head + (["text"] if text else [])
    print_table("Sequences", columns, cells, drop=("window", "top token", "its share", "repeated"))


def lines_of(row: Row, most: int = 8) -> str:
    """Lines of the examples of a row in their file."""
    lines = [place.rsplit(" ", 1)[1] for place in row.examples]
    return ", ".join(lines[:most]) + (f" and {len(lines) - most} more" if len(lines) > most else "")
