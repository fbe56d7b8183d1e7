"""A table of real small trainings, for the replay of tuning algorithms (tuning_replay.py).

    python benchmarks/tuning_table.py TEXT_FOLDER              # 729 trainings of 1.4M parameters; minutes on a GPU
    python benchmarks/tuning_table.py TEXT_FOLDER --tiny       # 16 of a few thousand parameters, on a CPU in a minute
    python benchmarks/tuning_table.py --best                   # the best training of every value of a key

A full factorial grid, so that a replay looks each point up and needs no surrogate model: 9 learning rates × 3 batch
sizes × 3 weight decays × 3 values of β2 × 3 warm-ups. Every training sees the same number of tokens of real text
(bytes), each in a data order of its own; its held-out loss is read at seven rungs, 1/64 … 1/2 and all of the tokens.
Models of one batch size train together in one process (stacked_models.py). Finished stacks are appended to the table,
so a run that was stopped goes on where it was; --seconds stops after the stack that passes that time.

Result: results/tuning_table.csv.gz, one row a training, and tuning_table.json with the machine and the settings.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from common import RESULTS, write_result
from stacked_models import Shape, StackedAdamW, Update, initial_weights, losses, windows

SUFFIXES = (".c", ".h", ".cc", ".cpp", ".go", ".java", ".md", ".py", ".rs", ".rst", ".S", ".sh", ".txt")
HELD_OUT = 20  # every twentieth file, by the hash of its name


KEYS = ("batch", "lr", "weight_decay", "beta2", "warmup")


@dataclass(frozen=True)
class Settings:
    shape: Shape = field(default_factory=Shape)
    seq: int = 256
    tokens: int = 1 << 22  # of a training
    lr: tuple[float, ...] = tuple(2e-4 * 2**k for k in range(9))
    batch: tuple[int, ...] = (8, 16, 32)  # sequences
    weight_decay: tuple[float, ...] = (0.01, 0.1, 1.0)
    beta2: tuple[float, ...] = (0.9, 0.98, 0.998)
    warmup: tuple[float, ...] = (0.01, 0.05, 0.25)  # of all steps
    rungs: tuple[int, ...] = (64, 32, 16, 8, 4, 2, 1)  # tokens of the whole training, divided by these
    eval_windows: int = 128
    stack: int = 81

    def rows(self) -> list[dict[str, float]]:
        """Every point of the grid, with its number; the batch size varies slowest."""
        points = itertools.product(*(getattr(self, key) for key in KEYS))
        return [{"trial": number, **dict(zip(KEYS, point, strict=True))} for number, point in enumerate(points)]


TINY = Settings(
    Shape(1, 32, 2, 64), 64, 1 << 14, (1e-3, 1e-2), (4, 8), (0.1,), (0.9, 0.98), (0.01, 0.25), (16, 8, 4, 2, 1), 16, 4
)


def read_text(folder: Path, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on and held-out bytes, of other files, at most `limit` together."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    named = sorted((hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest(), path) for path in files)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for index, (_, path) in enumerate(named):
        if total >= limit:
            break
        content = path.read_bytes()[:1_000_000]
        total += len(content)
        parts[index % HELD_OUT == 0].append(content)
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(each)), dtype=torch.uint8) for each in parts)
    if len(train) < 100_000 or len(held_out) < 10_000:
        raise SystemExit(f"{folder}: {len(train):,} bytes to train on and {len(held_out):,} held out are too few")
    return train, held_out


def gather(text: torch.Tensor, starts: torch.Tensor, seq: int) -> torch.Tensor:
    return text[starts[..., None] + torch.arange(seq + 1, device=text.device)].long()


@torch.no_grad()
def held_out_losses(weights: dict[str, torch.Tensor], text: torch.Tensor, settings: Settings) -> list[float]:
    """On the same windows for all models and rungs."""
    models = len(weights["norm"])
    starts = torch.linspace(0, len(text) - settings.seq - 2, settings.eval_windows, device=text.device).long()
    total = torch.zeros(models, device=text.device)
    for part in starts.split(16):
        tokens = gather(text, part, settings.seq).expand(models, -1, -1)
        with autocast(text.device):
            total += losses(weights, tokens, settings.shape) * len(part)
    return (total / len(starts)).tolist()


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def train_stack(
    rows: list[dict[str, float]], train: torch.Tensor, held_out: torch.Tensor, settings: Settings, compiled: bool
) -> Iterator[dict[str, float]]:
    """All of one batch size. Yields the rows with a loss for each rung; one that is not finite is left empty."""
    device, batch = train.device, int(rows[0]["batch"])
    steps = settings.tokens // (batch * settings.seq)
    seeds = [1 + int(row["trial"]) for row in rows]
    weights = initial_weights(settings.shape, seeds, device)

    def column(key: str) -> torch.Tensor:
        return torch.tensor([row[key] for row in rows], dtype=torch.float32, device=device)

    optimizer = StackedAdamW(weights, Update(column("lr"), column("warmup"), column("weight_decay"), column("beta2")))
    forward = torch.compile(losses) if compiled else losses
    order = torch.tensor(seeds, device=device)
    due = {max(1, steps // divisor): f"loss_{divisor}" for divisor in settings.rungs}
    found: list[dict[str, float]] = [dict(row) for row in rows]
    for step in range(1, steps + 1):
        tokens = gather(train, windows(order, step, batch, len(train) - settings.seq - 1), settings.seq)
        with autocast(device):
            loss = forward(weights, tokens, settings.shape)
        loss.sum().backward()
        optimizer.step(step, steps)
        if step in due:
            for row, value in zip(found, held_out_losses(weights, held_out, settings), strict=True):
                row[due[step]] = round(value, 5) if math.isfinite(value) else math.nan
    yield from found


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, before: list[dict[str, str]], rows: list[dict[str, float]]) -> list[dict[str, str]]:
    """The whole table again, then a rename: a kill leaves the table of before."""
    both = [*before, *({key: f"{value:g}" if key[:5] != "loss_" else f"{value}" for key, value in row.items()}
                       for row in rows)]  # fmt: skip
    partial = path.with_suffix(".tmp")
    with gzip.GzipFile(partial, "wb", mtime=0) as raw:
        lines = [",".join(both[0]), *(",".join(row.values()) for row in both)]
        raw.write(("\n".join(lines) + "\n").encode())
    partial.replace(path)
    return both


def print_best(rows: list[dict[str, str]]) -> None:
    """Of every value of a key the lowest final loss, with whatever values of the other keys it takes."""
    for key in KEYS:
        values = sorted({float(row[key]) for row in rows})
        best = [
            min((row for row in rows if float(row[key]) == value), key=lambda row: float(row["loss_1"]))
            for value in values
        ]
        print(
            f"{key:12}",
            "  ".join(
                f"{value:g}: {float(row['loss_1']):.4f} (lr {row['lr']})"
                for value, row in zip(values, best, strict=True)
            ),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", help="folder of text or source files")
    parser.add_argument("--best", action="store_true", help="train nothing; the table's best of every value of a key")
    parser.add_argument("--tiny", action="store_true", help="a few very small trainings")
    parser.add_argument("--out", type=Path, default=RESULTS / "tuning_table.csv.gz")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further stack after this time")
    parser.add_argument("--stack", type=int, default=0, help="models trained at once (81)")
    parser.add_argument("--bytes", type=int, default=64_000_000, help="of text that are read")
    parser.add_argument("--compile", action="store_true", help="compile the forward pass")
    chosen = parser.parse_args()
    if chosen.best:
        print_best(read_rows(chosen.out))
        return
    if chosen.text is None:
        parser.error("give a folder of text or source files")
    settings = TINY if chosen.tiny else Settings()
    if chosen.stack:
        settings = replace(settings, stack=chosen.stack)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, held_out = (part.to(device) for part in read_text(chosen.text, chosen.bytes))
    done = read_rows(chosen.out)
    finished = {int(row["trial"]) for row in done}
    print(f"{settings.shape.params:,} parameters, {len(train):,} bytes of text, {len(finished)} trainings done")
    start = time.perf_counter()
    for batch in settings.batch:
        left = [row for row in settings.rows() if row["batch"] == batch and row["trial"] not in finished]
        for first in range(0, len(left), settings.stack):
            if time.perf_counter() - start > chosen.seconds:
                print("time is up: start it again to go on")
                return
            rows = list(train_stack(left[first : first + settings.stack], train, held_out, settings, chosen.compile))
            done = append_rows(chosen.out, done, rows)
            print(f"{len(done)} trainings after {time.perf_counter() - start:.0f} s", flush=True)
    facts = {"trainings": len(done), "params": settings.shape.params, "text_bytes": len(train), **asdict(settings)}
    if not chosen.tiny:
        write_result("tuning_table", facts)


if __name__ == "__main__":
    main()
