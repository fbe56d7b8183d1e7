"""A pipeline at work: tasks in a shared folder, done by any number of processes on any number of machines.

    part 0 ─┐             ┌─ part 0 ─┐
    part 1 ─┼─ merge … ───┼─ part 1 ─┼─ … ─ shards ─ finish (card, index)
    part 2 ─┘  conclude   └─ part 2 ─┘
     phase 0               phase 1

Every worker does the same: it takes the next task that nobody has claimed or done, and waits where a step needs all
tasks of the one before. A task works in a folder of its own and is done when its record appears under `done/`, so a
worker that is killed leaves nothing but a task to be done again. No task depends on who did another.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ..data.sources import Part, Reading, broken_links, fingerprint_of, parts_of
from ..record.claims import Claim
from ..spec.errors import DataError
from ..spec.files import write_whole
from .assemble import cut_shards, write_shard
from .documents import CorpusStage, Document
from .languages import open_stage
from .pipeline import Phase, Pipeline
from .reading import Rejected, read_part, stored_documents, stored_line
from .statistics import Statistics
from .tally import Tally

WORK_FOLDER = ".work"
DOCUMENTS = "documents.jsonl"
LOOK_S = 0.1  # between two looks at tasks that others do
READ = "read"  # the name of the reader among the stages of a report

Notify = Callable[[str, int, int], None]


class PlanFile(msgspec.Struct):
    """How the sources were cut, when the run began: every worker sees the same."""

    fingerprint: str  # of the pipeline
    files: list[str]  # names, sizes and times of the sources' files
    parts: list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """A pipeline and the parts that its sources are cut into."""

    pipeline: Pipeline
    parts: tuple[Part, ...]

    @property
    def work(self) -> Path:
        return self.pipeline.out / WORK_FOLDER

    @cached_property
    def phases(self) -> list[Phase]:
        return self.pipeline.phases()

    def steps(self) -> Iterator[Step]:
        """In their order; the tasks of a step are known when the one before it is done."""
        numbers = range(len(self.parts))
        for index, phase in enumerate(self.phases):
            folder = self.work / f"phase-{index}"
            yield Step(f"{index}-parts", "curate", folder, [PartTask(self, index, number) for number in numbers])
            if phase.summarised:
                name, stage = phase.summarised
                merges = [MergeTask(self, index, number) for number in range(stage.merge_tasks)]
                yield Step(f"{index}-merge", f"merge {name}", self.work / f"merge-{index}", merges)
                yield Step(f"{index}-end", f"merge {name}", self.work / f"end-{index}", [ConcludeTask(self, index)])
        sizes = [record["bytes"] for record in self.step_records(len(self.phases) - 1)]
        shards = cut_shards(sizes, self.pipeline.output.shard_bytes)
        yield Step("shards", "write", self.work / "shards", [ShardTask(self, i, cut) for i, cut in enumerate(shards)])

    def step_records(self, phase: int) -> list[dict[str, Any]]:
        """What the parts of a phase reported, in order."""
        step = Step("", "", self.work / f"phase-{phase}", [])
        return [step.record(number) for number in range(len(self.parts))]

    def conclusion(self, phase: int) -> dict[str, Any]:
        """What the stage that ends a phase says about itself."""
        return Step("", "", self.work / f"end-{phase}", []).record(0)["report"]

    def part_folder(self, phase: int, number: int) -> Path:
        return self.work / f"phase-{phase}" / f"{number:06d}"

    def summaries(self, phase: int) -> list[Path]:
        return [self.part_folder(phase, number) / "files" / "summary" for number in range(len(self.parts))]

    def merged(self, phase: int) -> list[Path]:
        stage = self.corpus_stage(phase)
        return [self.work / f"merge-{phase}" / f"{number:06d}" / "files" for number in range(stage.merge_tasks)]

    def concluded(self, phase: int) -> Path:
        return self.work / f"end-{phase}" / "000000" / "files"

    def corpus_stage(self, phase: int) -> CorpusStage:
        """The stage that ends a phase."""
        summarised = self.phases[phase].summarised
        assert summarised is not None
        return summarised[1]


@dataclass(frozen=True)
class Step:
    name: str
    title: str  # in progress
    folder: Path
    tasks: list[Any]

    def done(self) -> set[int]:
        try:
            return {int(name[:6]) for name in os.listdir(self.folder / "done") if not name.startswith(".")}
        except FileNotFoundError:
            return set()

    def record(self, number: int) -> dict[str, Any]:
        return json.loads((self.folder / "done" / f"{number:06d}.json").read_bytes())

    def perform(self, number: int) -> bool:
        """Do one task, unless another process has it or did it."""
        folder = self.folder / f"{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        claim = Claim.take(folder)
        if claim is None:
            return False
        with claim.renewing():
            try:
                done = self.folder / "done" / f"{number:06d}.json"
                if not done.exists():
                    files = folder / "files"
                    if files.exists():
                        shutil.rmtree(files)  # of a process that was killed
                    files.mkdir()
                    record = self.tasks[number].run(files)
                    done.parent.mkdir(exist_ok=True)
                    write_whole(done, msgspec.json.encode(record))
                    self.tasks[number].after()
            finally:
                claim.release()
        return True


def work(run: Run, notify: Notify, finished: Callable[[], bool]) -> None:
    """Until every task of the run is done, by this process or by others. `notify` hears of tasks that are done."""
    for step in run.steps():
        total = len(step.tasks)
        while len(done := step.done()) < total:
            notify(step.title, len(done), total)
            worked = False
            for number in range(total):
                if finished():
                    return
                if number not in done and step.perform(number):
                    worked = True
                    notify(step.title, len(done := step.done()), total)
            if not worked:
                time.sleep(LOOK_S)


# --- tasks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartTask:
    """One pass over one part: decide, change, count, write what is kept."""

    run_: Run
    phase: int
    number: int

    def run(self, files: Path) -> dict[str, Any]:
        phase, output = self.run_.phases[self.phase], self.run_.pipeline.output
        names = phase.names()
        decisions = self.decisions(phase)
        tallies = [Tally(output.samples) for _ in decisions]
        steps = list(zip(decisions, tallies, strict=True))
        read = Tally(output.samples)
        last = phase.summarised is None
        statistics = Statistics(output.tokenizer) if last else None
        summary = None
        if phase.summarised:
            (files / "summary").mkdir()
            summary = phase.summarised[1].summarise(self.number, files / "summary")
        with open(files / DOCUMENTS, "wb") as out:
            for document in self.documents(read):
                text = document.text
                size = len(raw := text.encode())
                for decide, tally in steps:
                    reason = decide(document)
                    if reason:
                        tally.drop(document.id, reason, size, document.text)
                        break
                    if document.notes:
                        tally.note(document.notes)
                        document.notes = {}
                    if document.text is not text:
                        text = document.text
                        size = len(raw := text.encode())
                    tally.kept += 1
                    tally.kept_bytes += size
                else:
                    if summary:
                        summary.add(document)
                    if statistics:
                        statistics.add(document, raw)
                    out.write(stored_line(document))
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        if summary:
            summary.close()
        stages = {name: tally.to_dict() for name, tally in zip(names, tallies, strict=True)}
        record: dict[str, Any] = {"bytes": size, "stages": stages}
        if self.phase == 0:
            record["stages"] = {READ: read.to_dict(), **stages}
        if statistics:
            record["statistics"] = statistics.to_dict()
        return record

    def decisions(self, phase: Phase) -> list[Callable[[Document], str]]:
        found = [open_stage(stage) for _, stage in phase.stages]
        if phase.decided:
            before, run = self.phase - 1, self.run_
            summary = run.summaries(before)[self.number]
            stage = phase.decided[1]
            found.insert(0, stage.open(self.number, run.merged(before), run.concluded(before), summary))
        return found

    def documents(self, read: Tally) -> Iterator[Document]:
        if self.phase:
            yield from stored_documents(self.run_.part_folder(self.phase - 1, self.number) / "files" / DOCUMENTS)
            return
        for found in read_part(self.run_.parts[self.number], self.run_.pipeline.reading):
            if isinstance(found, Rejected):
                read.drop(found.id, found.reason, found.bytes, found.text)
                continue
            if found.notes:
                read.note(found.notes)
                found.notes = {}
            read.kept += 1
            read.kept_bytes += len(found.text.encode())
            yield found

    def after(self) -> None:
        """The text that was read is no longer needed."""
        if self.phase:
            (self.run_.part_folder(self.phase - 1, self.number) / "files" / DOCUMENTS).unlink(missing_ok=True)


@dataclass(frozen=True)
class MergeTask:
    run_: Run
    phase: int
    number: int

    def run(self, files: Path) -> dict[str, Any]:
        self.run_.corpus_stage(self.phase).merge(self.number, self.run_.summaries(self.phase), files)
        return {}

    def after(self) -> None:
        pass


@dataclass(frozen=True)
class ConcludeTask:
    run_: Run
    phase: int

    def run(self, files: Path) -> dict[str, Any]:
        run, stage = self.run_, self.run_.corpus_stage(self.phase)
        merged = run.merged(self.phase)
        stage.conclude(merged, run.summaries(self.phase), files)
        return {"report": stage.report(merged, files)}

    def after(self) -> None:
        pass


@dataclass(frozen=True)
class ShardTask:
    """Consecutive parts of the last phase become one file."""

    run_: Run
    number: int
    parts: range

    def run(self, files: Path) -> dict[str, Any]:
        run = self.run_
        last = len(run.phases) - 1
        sources = [run.part_folder(last, number) / "files" / DOCUMENTS for number in self.parts]
        return write_shard(self.number, sources, run.pipeline.output.format, files)

    def after(self) -> None:
        pass


# --- the plan ---------------------------------------------------------------------------------------------


def all_parts(source: str, reading: Reading, out: Path) -> list[Part]:
    """With the links that lead nowhere, which are counted."""
    links = broken_links(source, reading.glob)
    return [*parts_of(source, reading, out), *([Part("links", source, tuple(links))] if links else [])]


def open_run(pipeline: Pipeline, check: bool = True) -> Run:
    """The parts as the first process of the run found them; `check`: that their files are still the same."""
    file = pipeline.out / WORK_FOLDER / "plan.json"
    if file.exists():
        plan = msgspec.json.decode(file.read_bytes(), type=PlanFile)
        parts = tuple(Part(**{**part, "files": tuple(part["files"])}) for part in plan.parts)
        if check and fingerprint_of(parts) != plan.files:
            raise DataError(
                f"{pipeline.out}: files of the sources have changed since this run began; remove the folder, or choose "
                "another --out"
            )
        return Run(pipeline, parts)
    reading = pipeline.reading.reading()
    parts = tuple(part for source in pipeline.sources for part in all_parts(source, reading, pipeline.out))
    plan = PlanFile(pipeline.fingerprint(), fingerprint_of(parts), [msgspec.to_builtins(part) for part in parts])
    write_whole(file, msgspec.json.encode(plan))
    return Run(pipeline, parts)
