"""Engines for the tests of the API: made in the engine's process, so each is a function of this module."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import OutputDelta, Sequence
from lmworks.engine.core.scheduler import Chunk
from lmworks.model import GPT
from lmworks.serve.channel import LoadedEngine
from lmworks.spec import EngineSpec, ModelSpec, SpecError

MODEL = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=257, context=512)
SPEC = EngineSpec(device="cpu", block=16, blocks=1024, context=512, max_seqs=64, max_batch_tokens=256)
HELD = 1414  # the seed of requests that `Fragile` does not finish by itself


def tiny(**options: int) -> LoadedEngine:
    """One layer of width 32 over bytes, random weights."""
    torch.set_num_threads(1)
    model = GPT(MODEL)
    model.init_weights(0)
    runner = ModelRunner(model.eval(), SPEC.replace(**options), torch.device("cpu"), ByteTokenizer.vocab_size)
    return LoadedEngine(Engine(runner, ByteTokenizer(), seed=0))


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def in_use() -> tuple[int, int]:
    """Blocks of Python's allocator, and bytes of the C library's, that hold something."""
    gc.collect()
    look = ctypes.CDLL(None).mallinfo2
    look.restype = MallInfo
    found = look()
    return sys.getallocatedblocks(), found.uordblks + found.hblkhd


def telling(told: Path, **options: int) -> LoadedEngine:
    """Writes down what its process has in use, when that gets SIGUSR1."""

    def tell(*_: object) -> None:
        written = told.with_suffix(".new")
        written.write_text(" ".join(map(str, in_use())))
        written.rename(told)

    signal.signal(signal.SIGUSR1, tell)
    return tiny(**options)


def missing() -> LoadedEngine:
    raise SpecError("no model is there")


class Fragile(Engine):
    """Fails in the step after a prompt that begins with 13.

    Requests of seed HELD get a first token and no more until SIGCONT, as long as there are no others: a test that has
    to do something in the middle of an answer is in time, however slow it is.
    """

    let_go: frozenset[int] = frozenset()

    def step(self) -> list[OutputDelta]:
        if any(request.prompt[0] == 13 for request in self.requests.values()):
            raise RuntimeError("the device is on fire")
        if self.holds():
            time.sleep(0.005)
            return []
        return super().step()

    def holds(self) -> bool:
        begun = all(each.params.seed == HELD and each.first_token_time for each in self.requests.values())
        return begun and bool(self.requests.keys() - self.let_go) and not self.pending_outputs

    def let_all_go(self, *_: object) -> None:
        self.let_go = frozenset(self.requests)


def fragile(**options: int) -> LoadedEngine:
    engine = Fragile(tiny(**options).engine.runner, ByteTokenizer(), seed=0)
    signal.signal(signal.SIGCONT, engine.let_all_go)
    return LoadedEngine(engine)


def endless() -> LoadedEngine:
    """Weights that never come."""
    time.sleep(1000)
    return tiny()


SAY, SAID = b"SAY<<", b">>SAID"


class Scripted(Engine):
    """Writes what the last message says between SAY and SAID, and ends; then a grammar, where there is one, goes on."""

    def append_tokens(self, chunk: Chunk, tokens: list[int], *more: Any) -> None:
        sequence = chunk.sequence
        script = self.script(sequence)
        place = chunk.output_index - sequence.num_prompt_tokens
        if script is not None:
            sequence.token_by_token = True
            if place < len(script):
                tokens = [script[place]]
            elif sequence.matcher is None:
                tokens = [ByteTokenizer.vocab_size - 1]
        super().append_tokens(chunk, tokens, *more)

    def script(self, sequence: Sequence) -> bytes | None:
        if "script" not in sequence.extra:
            prompt = bytes(token for token in sequence.tokens[: sequence.num_prompt_tokens] if token < 256)
            _, found, rest = prompt.rpartition(SAY)
            sequence.extra["script"] = rest.partition(SAID)[0] if found else None
        return sequence.extra["script"]


def scripted(folder: str) -> LoadedEngine:
    """With a context that holds the prompts of real clients."""
    torch.set_num_threads(1)
    model = GPT(MODEL.replace(context=8192))
    model.init_weights(0)
    spec = SPEC.replace(context=8192, max_batch_tokens=2048)
    runner = ModelRunner(model.eval(), spec, torch.device("cpu"), ByteTokenizer.vocab_size)
    return LoadedEngine(Scripted(runner, ByteTokenizer(), seed=0), Path(folder))


def of_folder(folder: str) -> LoadedEngine:
    """The model of a Hugging Face folder."""
    from lmworks.loading import load_engine

    torch.set_num_threads(1)
    _, engine = load_engine(folder, SPEC.replace(dtype="fp32"), None, 0)
    return LoadedEngine(engine, Path(folder), begin_of_text=True)
