"""Other places that metrics go to, beside metrics.jsonl: TensorBoard and Weights & Biases.

Both are extras, imported when a spec asks for them. They get the keys of metrics.jsonl under the same names.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..record import RunFolder
from ..spec import LogSpec, RunSpec, SpecError


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_sinks(log: LogSpec, folder: RunFolder, spec: RunSpec, start: int = 0) -> list[Sink]:
    """The sinks that the spec asks for; `start` is the last step that is already done."""
    sinks: list[Sink] = []
    if log.tensorboard:
        sinks.append(TensorBoard(folder.path / "tensorboard", start))
    if log.wandb != "off":
        sinks.append(WeightsAndBiases(log, folder, spec))
    return sinks


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """What a chart can show; the step itself is its axis."""
    return {key: value for key, value in values.items() if isinstance(value, int | float) and key != "step"}


class TensorBoard:
    def __init__(self, path: Path, start: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SpecError('log.tensorboard = true needs TensorBoard: pip install "lmworks[tensorboard]"') from None
        # purge_step drops what an earlier attempt wrote beyond the checkpoint: those steps are replayed.
        self.writer = SummaryWriter(str(path), purge_step=start + 1 if start else None, flush_secs=10)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for key, value in numbers(values).items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, log: LogSpec, folder: RunFolder, spec: RunSpec) -> None:
        try:
            # Names, not the module: a folder called wandb beside the script would pass for an empty package.
            from wandb import Error, Settings, init
        except ImportError:
            raise SpecError(f'log.wandb = "{log.wandb}" needs Weights & Biases: pip install "lmworks[wandb]"') from None
        mode: Any = log.wandb
        try:
            self.run = init(
                project=log.project,
                name=spec.name,
                id=run_id(folder),
                resume="allow"
                if mode == "online"
                else None,  # offline there is no server to ask; `wandb sync` joins by id
                config=spec.to_dict(),
                dir=str(folder.path),
                mode=mode,
                settings=Settings(console="off", silent=mode == "offline"),
            )
        except Error as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise SpecError(f'log.wandb = "{mode}" failed: {why}; log.wandb = "offline" needs no account') from None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(numbers(values), step=step)

    def close(self) -> None:
        self.run.finish()


def run_id(folder: RunFolder) -> str:
    """One id for the whole run, kept in its folder, so that a resume continues the same curves."""
    path = folder.path / "wandb" / "id"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(secrets.token_hex(8))
    return path.read_text()
