"""Engines for the tests of the API: made in the engine's process, so each is a function of this module."""

from __future__ import annotations

import os
import time

import torch

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.engine.engine import Engine
from lmworks.engine.request import Piece
from lmworks.engine.runner import Runner
from lmworks.model import GPT
from lmworks.serve.channel import Served
from lmworks.spec import EngineSpec, ModelSpec, SpecError

MODEL = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=257, context=512)
SPEC = EngineSpec(device="cpu", block=16, blocks=1024, context=512, max_seqs=64, max_batch_tokens=256)


def tiny(**options: int) -> Served:
    """One layer of width 32 over bytes, random weights."""
    torch.set_num_threads(1)
    model = GPT(MODEL)
    model.init_weights(0)
    runner = Runner(model.eval(), SPEC.replace(**options), torch.device("cpu"), ByteTokenizer.vocab_size)
    return Served(Engine(runner, ByteTokenizer(), seed=0))


def missing() -> Served:
    raise SpecError("no model is there")


class Fragile(Engine):
    """Fails in the step after a prompt that begins with 13, hangs after one with 14, ends its process at 15."""

    def step(self) -> list[Piece]:
        first = {request.prompt[0] for request in self.requests.values()}
        if 13 in first:
            raise RuntimeError("the device is on fire")
        if 14 in first:
            time.sleep(1000)
        if 15 in first:
            os._exit(7)
        return super().step()


def fragile() -> Served:
    served = tiny()
    return Served(Fragile(served.engine.runner, ByteTokenizer(), seed=0))
