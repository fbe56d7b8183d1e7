"""A database that is spoken to in SQL: SQLite in a file, or PostgreSQL. Statements are written with ? for values."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from ...spec import LMWorksError

BUSY_S = 5.0  # how long another process may hold SQLite's lock
CONNECT_S = 3
STATEMENT_MS = 5000


class StoreDown(LMWorksError):
    """The database cannot be reached, or cannot write."""


class Cursor(Protocol):
    """What SQLite's and psycopg's cursors have in common."""

    @property
    def rowcount(self) -> int: ...

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Any: ...

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> Any: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class Database(Protocol):
    serial: str  # type of a column that counts up

    def transaction(self) -> Any:
        """A context manager: all of it is written, or nothing. Raises StoreDown."""

    def interrupt(self) -> None:
        """From another thread: what waits for an answer fails."""

    def close(self) -> None: ...


class SQLiteDatabase:
    """WAL: readers do not wait for the writer. A commit is on disk when it returns."""

    serial = "INTEGER PRIMARY KEY"

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # others must not read digests
            self.connection = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=256
            )
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                self.connection.execute(f"PRAGMA {pragma}")
        except (OSError, sqlite3.Error) as error:
            raise StoreDown(f"{path}: {error}") from None

    @contextmanager
    def transaction(self) -> Iterator[Cursor]:
        cursor = self.connection.cursor()
        try:
            cursor.execute("BEGIN IMMEDIATE")
            yield cursor
            cursor.execute("COMMIT")
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise StoreDown(f"the store cannot be written: {error}") from None
        finally:
            if self.connection.in_transaction:
                with suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
            cursor.close()

    def interrupt(self) -> None:
        self.connection.interrupt()

    def close(self) -> None:
        self.connection.close()


class PostgresDatabase:
    """One connection, made anew where it was lost."""

    serial = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise LMWorksError("tenants.store in PostgreSQL needs psycopg: pip install 'lmworks[postgres]'") from None
        self.psycopg, self.url = psycopg, url
        self.connection: Any = None

    def connected(self) -> Any:
        if self.connection is None or self.connection.closed:
            self.connection = self.psycopg.connect(
                self.url,
                connect_timeout=CONNECT_S,
                options=f"-c statement_timeout={STATEMENT_MS}",
                keepalives_idle=10,
                tcp_user_timeout=STATEMENT_MS,
                application_name="lmworks-gateway",
            )
        return self.connection

    @contextmanager
    def transaction(self) -> Iterator[Cursor]:
        try:
            connection = self.connected()
            with connection.transaction(), connection.cursor() as cursor:
                yield PostgresCursor(cursor)
        except self.psycopg.IntegrityError:
            raise
        except self.psycopg.Error as error:
            self.close()
            raise StoreDown(f"PostgreSQL: {str(error).splitlines()[0]}") from None

    def interrupt(self) -> None:
        connection = self.connection
        if connection is None or connection.closed:
            return  # it is being made, which has a time-out of its own
        with suppress(OSError, self.psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as there:
            there.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            with suppress(Exception):
                connection.close()


class PostgresCursor:
    def __init__(self, cursor: Any) -> None:
        self.cursor = cursor

    @property
    def rowcount(self) -> int:
        return int(self.cursor.rowcount)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self.cursor.execute(re.sub(r"\?", "%s", sql), values)

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> Any:
        return self.cursor.executemany(re.sub(r"\?", "%s", sql), rows)

    def fetchone(self) -> Any:
        return self.cursor.fetchone()

    def fetchall(self) -> list[Any]:
        return list(self.cursor.fetchall())


def open_database(url: str) -> Database:
    if url.startswith("sqlite:///"):
        return SQLiteDatabase(Path(url.removeprefix("sqlite:///")))
    return PostgresDatabase(url)
