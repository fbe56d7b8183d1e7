"""Usage from the journal into the store, in batches; budgets count it from the moment a request is admitted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from .budgets import Budgets
from .config import Tenants
from .database import StoreDown
from .journal import Journal, JournalDown, OpenLine
from .limits import periods_of
from .store import Store
from .store_thread import StoreThread
from .usage import UsageRecord

log = logging.getLogger("lmworks.gateway")

BATCH = 2000  # records in one transaction
REFRESH_S = 2.0  # how often what other gateways spent is read


class Ledger:
    def __init__(self, store: Store, journal: Journal, config: Callable[[], Tenants], thread: StoreThread) -> None:
        self.store, self.journal, self.config, self.thread = store, journal, config, thread
        self.budgets = Budgets()
        self.waiting: list[UsageRecord] = []  # in the journal, not in the store
        self.store_error: str | None = None
        self.journal_error: str | None = None
        self.refreshed = 0.0

    def begin(self, id: str, tenant: str, key: str, model: str, path: str, began: float) -> OpenLine:
        """Raises JournalDown."""
        try:
            line = self.journal.begin(id, began, tenant, key, model, path)
        except JournalDown as error:
            self.journal_error = str(error)
            raise
        self.journal_error = None
        return line

    def end(self, line: OpenLine, record: UsageRecord | None) -> None:
        try:
            self.journal.end(line, record)
        except JournalDown as error:  # it is still written into the store, unless we are killed first
            self.journal_error = str(error)
            log.error("usage is not in the journal", extra={"reason": str(error)})
        if record is not None:
            self.waiting.append(record)

    # --- the store ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Before the first request: what was left behind, and what has been spent. Raises StoreDown."""
        recovered = self.journal.recovered
        for at in range(0, len(recovered), BATCH):
            self.store.add_usage(recovered[at : at + BATCH])
        self.journal.forget(list(self.journal.old))
        self.budgets.refresh(self.store.spent(periods_of(time.time())))

    async def flush(self) -> None:
        """Everything that has ended so far, to disk and into the store."""
        files, records, written = self.journal.turn_over(), self.waiting, 0
        self.waiting = []
        try:
            await self.sync()
            for at in range(0, len(records), BATCH):
                batch = records[at : at + BATCH]
                await self.thread.run(partial(self.store.add_usage, batch))
                written = at + len(batch)
                for record in batch:
                    self.budgets.written(record.places(), record.spending())
        except StoreDown as error:
            self.down(error)
            return
        finally:  # also where it is cancelled: `close` writes them
            self.waiting = records[written:] + self.waiting
        self.journal.forget(files)
        await self.refresh()
        if self.store_error is not None:
            log.info("the store is back", extra={"records": len(records)})
            self.store_error = None

    async def sync(self) -> None:
        try:
            await asyncio.to_thread(self.journal.sync)
        except OSError as error:
            self.journal_error = str(error)

    async def refresh(self) -> None:
        """What all gateways together have spent."""
        now = time.time()
        if not 0 <= now - self.refreshed < REFRESH_S:
            self.refreshed = now
            try:
                spent = await self.thread.run(lambda: self.store.spent(periods_of(now)))
            except StoreDown as error:
                self.down(error)
                raise
            self.budgets.refresh(spent)

    def down(self, error: StoreDown) -> None:
        if self.store_error is None:
            log.error("the store is away: usage stays in the journal", extra={"reason": str(error)})
        self.store_error = str(error)

    def close(self) -> None:
        self.journal.close()
