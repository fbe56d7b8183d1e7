"""Files that are read again when they change (configuration, certificates); if they are invalid, the old ones stay."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from ..spec import SpecError

log = logging.getLogger("lmworks.serve")

POLL_S = 1.0  # how often the file is checked for changes

Config = TypeVar("Config")


class ReloadedFile(Generic[Config]):
    """The current configuration. Subclasses say how it is read, and which changes need a restart."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.clock = path, clock
        self.stamp = self.file_stamps()
        self.config = self.read()
        self.checked_at = clock()
        self.error: str | None = None  # why the file as it is now is not in use

    @property
    def watched(self) -> tuple[Path, ...]:
        return () if self.path is None else (self.path,)

    def read(self) -> Config:
        raise NotImplementedError

    def check_change(self, config: Config) -> None:
        """Raises SpecError where a running server cannot take this one over."""

    def current(self) -> Config:
        """Checks the files every POLL_S: cheap enough for every request."""
        if self.clock() - self.checked_at >= POLL_S:
            self.check_files()
        return self.config

    def check_files(self) -> None:
        self.checked_at = self.clock()
        stamp = self.file_stamps()
        if stamp != self.stamp:
            self.stamp = stamp
            self.reload()

    def reload(self) -> None:
        path = ", ".join(map(str, self.watched))
        try:
            config = self.read()
            self.check_change(config)
            self.config, self.error = config, None
            log.info("config reloaded", extra={"path": path})
        except SpecError as error:
            self.error = str(error)
            log.error("config not reloaded: the old one stays", extra={"path": path, "reason": str(error)})

    def file_stamps(self) -> list[tuple[int, ...] | None]:
        return [file_stamp(path) for path in self.watched]


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Changes when the file is edited or replaced; None: there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def has_terminal() -> bool:
    """A closed terminal sends SIGHUP, which must end the process; a service manager sends it to have files read."""
    return os.isatty(0)
