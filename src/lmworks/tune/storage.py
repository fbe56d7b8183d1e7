"""Where Optuna keeps a study: a journal file, SQLite, PostgreSQL, or the memory of this process.

What is wrong with a storage is one line that names it, without its password.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..spec.errors import LMWorksError, SpecError

IN_MEMORY = ":memory:"
POSTGRES = "postgresql://"
OWNER = "lmworks_sweep"  # an attribute of a study: the sweep that it belongs to
CONNECT_S = 10
LOCKED_S = 60  # that SQLite waits for others who write
ATTEMPTS = 5  # to create tables that another driver creates at the same moment


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise SpecError('tuning needs Optuna, which is not installed: pip install "lmworks[tune]"') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def storage_of(where: str) -> Any:
    """`where`: the path of a journal, the URL of a database (sqlite:///…, postgresql://…), or IN_MEMORY."""
    optuna = import_optuna()
    if where == IN_MEMORY:
        return optuna.storages.InMemoryStorage()
    if "://" in where:
        return database_of(where)
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(where)
    try:
        return optuna.storages.JournalStorage(backend)
    except (OSError, ValueError) as error:
        raise SpecError(f"--storage {where} is no journal of Optuna: {error}") from None


def database_of(url: str) -> Any:
    storages = import_optuna().storages
    options: dict[str, Any] = {"pool_pre_ping": True}  # a server that was restarted between two requests is no error
    if url.startswith("sqlite"):
        options["connect_args"] = {"timeout": LOCKED_S}
    if url.startswith(POSTGRES):  # what that stands for differs between versions of SQLAlchemy
        url = url.replace(POSTGRES, "postgresql+psycopg://", 1)
        options["connect_args"] = {"connect_timeout": CONNECT_S}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return storages.get_storage(storages.RDBStorage(url, engine_kwargs=options))
        except ImportError as error:
            missing = getattr(error.__cause__ or error, "name", None) or "its driver"
            advice = ': pip install "lmworks[postgres]"' if missing.startswith("psycopg") else ""
            raise SpecError(f"--storage {shown(url)}: {missing} is not installed{advice}") from None
        except Exception as error:  # sqlalchemy's, the driver's, or Optuna's own
            if attempt == ATTEMPTS or not is_race(error):
                example = "e.g. sqlite:///tune.db or postgresql://user@host/name"
                raise SpecError(f"--storage {shown(url)}: {cause_of(error)}; {example}") from None
        time.sleep(0.2 * attempt)
    raise AssertionError


def is_race(error: Exception) -> bool:
    """Whether somebody else has just made the same tables."""
    return "already exists" in str(error) or "UNIQUE constraint" in str(error)


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """A storage that no longer answers ends the driver with one line."""
    optuna = import_optuna()
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        said = cause_of(error.__cause__ or error)
        raise LMWorksError(f"the storage {shown(where)} failed: {said}; the same command goes on with it") from None


def cause_of(error: BaseException) -> str:
    """The first line of what the database said; without the statement, which SQLAlchemy adds."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0].removesuffix(".") if lines else type(error).__name__


def shown(url: str) -> str:
    """Without the password, and as it was typed."""
    return re.sub(r"(://[^/:@]*):[^@/]*@", r"\1:***@", url.replace("+psycopg", "", 1))


def open_study(storage: Any, name: str, owner: str, where: str) -> None:
    """Made where it is not there yet. It belongs to the sweep `owner` (a journal in the folder of a sweep needs none):
    another sweep of the same name, in another folder, is refused."""
    optuna = import_optuna()
    study = optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True)
    if not owner:
        return
    known = study.user_attrs.get(OWNER)
    if known is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(OWNER, owner)
    elif known != owner:
        raise SpecError(f"--storage {shown(where)} has a study '{name}' of another sweep; choose another --name")
