"""benchmarks.md of a workspace: a table of its runs, and what the learner writes beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..spec.errors import SpecError
from ..spec.files import write_whole
from .runs import Run

FILE = "benchmarks.md"
BEGIN, END = "<!-- runs: `lmworks learn benchmarks` writes this table -->", "<!-- end runs -->"
COLUMNS = ["run", "trainer", "model", "devices", "batch", "precision", "recompute", "peak GiB", "tokens/s", "last loss"]
PROMPT = "What do the figures show, and why?"
START = f"# Benchmarks\n\n{BEGIN}\n{END}\n\n## What I conclude\n\n{PROMPT}\n"
# What two runs have in common that are compared, beside what they are compared in.
SETTINGS = (
    "trainer", "model_size", "world_size", "device", "batch_size", "seq_len", "grad_accum_steps", "mixed_precision",
    "gradient_checkpointing",
)  # fmt: skip


@dataclass(frozen=True)
class Benchmarks:
    """What the file says."""

    text: str

    @classmethod
    def read(cls, workspace: Path) -> Benchmarks:
        file = workspace / FILE
        return cls(file.read_text(errors="replace") if file.exists() else "")

    def has(self, run: Run) -> bool:
        """The run stands there with the figures that its folder has."""
        return line_of(row_of(run)) in self.text.splitlines()

    def names(self, run: Run) -> bool:
        return f"| {run.name} |" in self.text

    @property
    def own_words(self) -> int:
        """Outside of the table and headings."""
        before, _, rest = self.text.partition(BEGIN)
        outside = [*before.splitlines(), *rest.partition(END)[2].splitlines()]
        return sum(len(line.split()) for line in outside if line != PROMPT and not line.startswith(("#", "|")))


def row_of(run: Run) -> list[str]:
    about = run.about
    batch = f"{about['batch_size']} × {about['seq_len']}"
    if about["grad_accum_steps"] > 1:
        batch += f" × {about['grad_accum_steps']}"
    precision = "fp32" if about["mixed_precision"] == "no" else about["mixed_precision"]
    return [
        run.name, about["trainer"], about["model_size"], run.devices, batch, precision,
        "yes" if about["gradient_checkpointing"] else "no", f"{run.peak / 2**30:.3f}", f"{run.tokens_per_s:,.1f}",
        f"{run.lines[-1]['loss']:.3f}",
    ]  # fmt: skip


def line_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_benchmarks(workspace: Path, runs: list[Run]) -> Path:
    """The table anew; what stands around it stays."""
    file = workspace / FILE
    try:
        text = file.read_text() if file.exists() else START
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    if BEGIN not in text or END not in text:
        text += f"\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    table = [line_of(COLUMNS), line_of(["---"] * len(COLUMNS)), *(line_of(row_of(run)) for run in runs)]
    write_whole(file, "\n".join([before + BEGIN, *table, END + rest.partition(END)[2]]))
    return file


def comparable(one: Run, other: Run, differ: str) -> bool:
    """Alike in all settings but `differ`."""
    return all((one.about.get(key) == other.about.get(key)) == (key != differ) for key in SETTINGS)
