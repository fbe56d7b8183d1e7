"""Engines for the tests of the API: made in the engine's process, so each is a function of this module."""

from __future__ import annotations

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
    """Fails in the step after a prompt that begins with 13."""

    def step(self) -> list[Piece]:
        if any(request.prompt[0] == 13 for request in self.requests.values()):
            raise RuntimeError("the device is on fire")
        return super().step()


def fragile() -> Served:
    served = tiny()
    return Served(Fragile(served.engine.runner, ByteTokenizer(), seed=0))


def endless() -> Served:
    """Weights that never come."""
    time.sleep(1000)
    return tiny()
