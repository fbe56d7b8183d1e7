"""The one thread that speaks to the store: the event loop waits for it, never for a database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .database import Database

ANSWER_S = 6.0  # a little more than a statement may take at the server: beyond it the connection is given up

Result = TypeVar("Result")


class StoreThread:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.executor = ThreadPoolExecutor(1, "store")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Raises StoreDown, also where the server takes a question and does not answer."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, work)
        try:
            async with asyncio.timeout(ANSWER_S):  # `wait_for` of Python 3.11 may lose a cancellation
                return await asyncio.shield(future)
        except TimeoutError:
            self.database.interrupt()
            return await future

    def close(self) -> None:
        self.executor.shutdown()
