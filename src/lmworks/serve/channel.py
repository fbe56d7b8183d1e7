"""Messages between API, engine and worker processes: pickles on a socket pair.

A frame is its length (4 bytes) and a pickle. Many events travel in one frame, as plain tuples: a step of hundreds of
sequences costs one write and one read. Socket pairs are private to the two processes, so unpickling is safe.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.fim import Sentinels
from ..data.tokenizer import FileTokenizer, Tokenizer
from .backend import EngineRequest, TransferSettings
from .cache_events import CacheChange
from .parsers.names import ParserNames

if TYPE_CHECKING:  # the API does without torch
    from ..engine.core.engine import Engine

LENGTH = struct.Struct("!I")
ENDED = (asyncio.IncompleteReadError, ConnectionError)  # of `read_frame`: the other side is gone


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, and what the API needs to tokenize prompts for it."""

    engine: Engine
    folder: Path | None = None  # of the model: may hold a chat template
    begin_of_text: bool = False  # text prompts begin as `transformers` would have them (Hugging Face folders)
    chat_template: str | None = None  # to use instead of the folder's
    sentinels: Sentinels | None = None  # of infilling, where the model knows any
    parsers: ParserNames = ParserNames()  # of its answers, where they were named


Factory = Callable[[], LoadedEngine]  # picklable: a function of a module, or functools.partial of one


# --- messages ---------------------------------------------------------------------------------------------


class LoadEngine(NamedTuple):
    """The first message to an engine process."""

    path: list[str]  # sys.path, before the factory is unpickled
    factory: bytes


class EngineReady(NamedTuple):
    """The engine is ready."""

    context: int
    vocab: int
    max_seqs: int
    adapters: tuple[str, ...]
    tokenizer: bytes
    folder: Path | None
    begin_of_text: bool
    chat_template: str | None
    sentinels: Sentinels | None
    parsers: ParserNames
    hidden: int
    scalar_head: bool
    block_size: int  # 0: without a prefix cache
    eos: tuple[int, ...]
    transfer: TransferSettings | None


class Submit(NamedTuple):
    number: int  # of the request, on both sides
    request: EngineRequest


class Cancel(NamedTuple):
    number: int


class Control(NamedTuple):
    """An operation between two steps: a method of EngineLoop.CONTROLS."""

    number: int
    action: str
    arguments: tuple[Any, ...]


class ControlReply(NamedTuple):
    number: int
    error: str  # empty: done
    adapters: tuple[str, ...]  # that there are now
    asleep: bool


class Profile(NamedTuple):
    """Record the steps from now on, at most so many and so long, and then write them; `trace` None: end it now."""

    trace: Path | None
    steps: int = 0
    seconds: float = 0.0


class ProfileReport(NamedTuple):
    """Sent twice: when the profiler is being started, or stopped (asked, or at its limit), and when that is over."""

    busy: bool  # until the second report the engine takes no step
    recording: bool
    error: str = ""  # why it records nothing, or has written nothing


class StepReport(NamedTuple):
    """Results of the last steps."""

    steps: int  # since the start
    compiled: list[int]  # requests whose grammar was compiled: the engine has them
    started: list[int]  # requests that were scheduled
    refused: list[tuple[int, str]]
    events: list[tuple[int, tuple[Any, ...]]]  # by request: the fields of an Event
    metrics: dict[str, Any] | None  # every METRICS_INTERVAL_S
    cache: CacheChange | None = None  # of the prefix cache


class EngineFailed(NamedTuple):
    """The last message of a process that failed."""

    error: str
    usage: bool = False  # a usage error (SpecError), not a failure


# --- frames -----------------------------------------------------------------------------------------------


def encode_frame(message: Any) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message; raises IncompleteReadError or ConnectionError at the end."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


async def spawn(
    module: str, *words: str, inherit: tuple[int, ...] = ()
) -> tuple[subprocess.Popen[bytes], asyncio.StreamReader, asyncio.StreamWriter]:
    """Starts `python -m module …words FD …inherit` and connects to it: FD is its end of a socket pair.

    In its own session: Ctrl-C reaches the API, which then closes the socket.
    """
    own_end, child_end = socket.socketpair()
    descriptors = [child_end.fileno(), *inherit]
    command = [sys.executable, "-m", module, *words, *map(str, descriptors)]

    def start() -> subprocess.Popen[bytes]:
        with child_end:  # here, so that a cancelled caller does not close it before the process has it
            return subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, start_new_session=True)

    process = await asyncio.to_thread(start)
    return process, *await asyncio.open_connection(sock=own_end)


class SocketChannel:
    """A blocking end of the socket pair: one thread reads, any may write."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.file = connection.makefile("rb")
        self.writing = threading.Lock()

    def send(self, message: Any) -> None:
        """Blocks while the other side does not read (backpressure)."""
        data = encode_frame(message)
        with self.writing:
            self.connection.sendall(data)

    def messages(self) -> Iterator[Any]:
        """Until the other side closes, or is gone."""
        while len(head := self.file.read(LENGTH.size)) == LENGTH.size:
            body = self.file.read(LENGTH.unpack(head)[0])
            if len(body) < LENGTH.unpack(head)[0]:
                return
            yield pickle.loads(body)


# --- tokenizers -------------------------------------------------------------------------------------------


def pack_tokenizer(tokenizer: Tokenizer | None) -> bytes:
    """A pickled `tokenizers.Tokenizer` loses settings that `FileTokenizer` makes again."""
    if isinstance(tokenizer, FileTokenizer):
        return pickle.dumps((tokenizer.inner.to_str(), tokenizer.eot))
    return pickle.dumps(tokenizer)


def unpack_tokenizer(packed: bytes) -> Tokenizer | None:
    found = pickle.loads(packed)
    if not isinstance(found, tuple):
        return found
    import tokenizers

    text, eot = found
    return FileTokenizer(tokenizers.Tokenizer.from_str(text), eot)
