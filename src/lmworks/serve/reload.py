"""A configuration file that is read again when it changes; an invalid one is logged, and the old one stays."""

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
        self.stamp = self.file_stamp()
        self.config = self.read()
        self.checked_at = clock()

    def read(self) -> Config:
        raise NotImplementedError

    def check_change(self, config: Config) -> None:
        """Raises SpecError where a running server cannot take this one over."""

    def current(self) -> Config:
        """Checks the file every POLL_S: cheap enough for every request."""
        if self.path is not None and self.clock() - self.checked_at >= POLL_S:
            self.checked_at = self.clock()
            stamp = self.file_stamp()
            if stamp != self.stamp:
                self.stamp = stamp
                self.reload()
        return self.config

    def reload(self) -> None:
        try:
            config = self.read()
            self.check_change(config)
            self.config = config
            log.info("config reloaded", extra={"path": str(self.path)})
        except SpecError as error:
            log.error("config not reloaded: the old one stays", extra={"path": str(self.path), "reason": str(error)})

    def file_stamp(self) -> tuple[int, ...] | None:
        """Changes when the file is edited or replaced; None: there is no file."""
        try:
            found = os.stat(self.path) if self.path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
