"""A pipeline file: sources, how they are read, stages in their order, and what is written."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from ..data.sources import Reading
from ..spec.errors import SpecError
from ..spec.load import read_toml
from ..spec.schema import Section, opt
from .documents import CorpusStage, DocumentStage, Stage
from .stages import make_stage

VERSION = 2  # of what stages decide and how it is written: a change makes folders again

RULES = {"gopher": ("gopher_quality", "gopher_repetition")}
"""Names of `--rules` that stand for several stages; any other is the name of a stage."""

FOR_PROSE = ("gopher_quality", "gopher_repetition", "c4", "c4_paragraphs", "fineweb", "language")
FOR_CODE = ("code", "code_language", "license", "syntax")
"""Where `--rules` has some of both, each is for its own kind of documents."""


@dataclass(frozen=True)
class ReadingSpec(Section):
    section: ClassVar[str] = "reading"

    text_field: str = opt("text", "Field of a JSON line, column of a parquet table or a Hugging Face dataset.")
    glob: str = opt("**/*", "Which files of a folder are documents.")
    separator: str = opt("", "Cuts text files into documents; empty: a file is one.")
    invalid_utf8: str = opt(
        "drop",
        "Files that are not UTF-8: dropped and counted, or kept with U+FFFD in place of each bad byte, or read as "
        "Windows-1252 (every byte is a character).",
        choices=("drop", "replace", "cp1252"),
    )
    max_document_bytes: int = opt(64 * 2**20, "Longer documents are dropped and counted, without reading them.", ge=1)
    part_bytes: int = opt(16 * 2**20, "About so much of a source is one task; it does not change the result.", ge=1)

    def reading(self) -> Reading:
        return Reading(self.text_field, self.glob, self.separator, self.part_bytes)


@dataclass(frozen=True)
class OutputSpec(Section):
    section: ClassVar[str] = "output"

    format: str = opt("jsonl", "Of the shards.", choices=("jsonl", "jsonl.gz", "parquet"))
    shard_bytes: int = opt(256 * 2**20, "A shard ends with the task that reaches this.", ge=1)
    samples: int = opt(5, "Dropped documents to keep the beginning of, for each stage and reason.", ge=0)
    tokenizer: str = opt("bytes", "Whose tokens the data card counts: bytes, or a tokenizer.json.")


@dataclass(frozen=True)
class Pipeline:
    """What was asked for: all that the result depends on."""

    sources: tuple[str, ...]
    out: Path
    stages: tuple[Stage, ...]
    reading: ReadingSpec = ReadingSpec()
    output: OutputSpec = OutputSpec()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {"sources", "out", "stages", "reading", "output"}
        for key in data:
            if key not in known:
                raise SpecError(f"unknown key {key!r}; a pipeline has {', '.join(sorted(known))}")
        for key, kind in (("sources", list), ("out", str), ("stages", list)):
            if not isinstance(data.get(key), kind) or not data[key]:
                form = {"sources": '["a.jsonl", "src/"]', "out": '"data/clean"', "stages": '["normalise", "gopher"]'}
                raise SpecError(f"a pipeline needs {key}, e.g. {key} = {form[key]}")
        if not all(isinstance(source, str) for source in data["sources"]):
            raise SpecError(f"sources must be strings, got {data['sources']!r}")
        stages = [make_stage(one) for entry in data["stages"] for one in expand(entry)]
        reading = ReadingSpec.from_dict(data.get("reading", {}))
        output = OutputSpec.from_dict(data.get("output", {}))
        return cls(tuple(data["sources"]), Path(data["out"]), tuple(stages), reading, output)

    @classmethod
    def load(cls, file: Path, out: Path | None = None) -> Self:
        data = read_toml(file)
        return cls.from_dict({**data, "out": str(out)} if out else data)

    def request(self) -> dict[str, Any]:
        """What decides the result, as JSON can hold it; two pipelines with equal requests are the same."""
        reading = {name: value for name, value in self.reading.to_dict().items() if name != "part_bytes"}
        stages = [{"stage": stage.name, **stage.to_dict(), **self.file_digests(stage)} for stage in self.stages]
        output = self.output.to_dict()
        return {"version": VERSION, "sources": list(self.sources), "reading": reading, "stages": stages} | {
            "output": output
        }

    def file_digests(self, stage: Stage) -> dict[str, str]:
        """Of the files that a stage reads: another list of evaluation sets is another pipeline."""
        found = {}
        for name in stage.files:
            value = getattr(stage, name)
            for file in [value] if isinstance(value, str) else value:
                if file and os.path.isfile(file):
                    found[f"sha256 of {file}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        return found

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.request(), sort_keys=True).encode()).hexdigest()

    def names(self) -> list[str]:
        """Of the stages in reports; the second of a name is called `name#2`."""
        seen: dict[str, int] = {}
        names = []
        for stage in self.stages:
            seen[stage.name] = seen.get(stage.name, 0) + 1
            names.append(stage.name if seen[stage.name] == 1 else f"{stage.name}#{seen[stage.name]}")
        return names

    def phases(self) -> list[Phase]:
        """Cut after each stage that needs all documents: those before it run in one pass over a part."""
        phases = [Phase(None, [], None)]
        for name, stage in zip(self.names(), self.stages, strict=True):
            last = phases[-1]
            if isinstance(stage, CorpusStage):
                phases[-1] = dataclasses.replace(last, summarised=(name, stage))
                phases.append(Phase((name, stage), [], None))
            elif isinstance(stage, DocumentStage):
                last.stages.append((name, stage))
        return phases


@dataclass(frozen=True)
class Phase:
    """One pass over the parts: what the corpus stage before it decided, stages of single documents, and the summary for
    the corpus stage after it."""

    decided: tuple[str, CorpusStage] | None
    stages: list[tuple[str, DocumentStage]]
    summarised: tuple[str, CorpusStage] | None

    def names(self) -> list[str]:
        return [*([self.decided[0]] if self.decided else []), *(name for name, _ in self.stages)]


def expand(entry: Any) -> list[Any]:
    return list(RULES.get(entry, (entry,))) if isinstance(entry, str) else [entry]


def common_pipeline(sources: Sequence[str], rules: str, dedup: str, **others: Any) -> dict[str, Any]:
    """What `lmworks data curate SOURCE… --rules … --dedup …` stands for, as a pipeline file would say it."""
    named = list(itertools.chain(*(expand(rule) for rule in words(rules))))
    kinds = {"prose": FOR_PROSE, "code": FOR_CODE}
    both = all(any(name in kind for name in named) for kind in kinds.values())
    stages = []
    for name in dict.fromkeys(["normalise", *named, *words(dedup)]):
        on = next((on for on, kind in kinds.items() if both and name in kind), None)
        stages.append({"stage": name, "on": on} if on else name)
    return {"sources": list(sources), "stages": stages, **others}


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
