"""Suites every so many steps of a run: an engine over a copy of the weights, results in the run folder and metrics."""

from __future__ import annotations

from pathlib import Path

import torch

from ..data import Tokenizer
from ..data.chat_tokenizer import load_model_tokenizer
from ..data.fim import vocab_with_sentinels
from ..engine.quantization.quantized_model import MetaModel
from ..loading import LoadedModel, make_engine
from ..model import GPT
from ..spec import EngineSpec, RunSpec, SpecError
from ..train import Trainer
from .engine_model import EngineModel
from .formats import FORMATS
from .formats.format import HELD_OUT
from .runner import check_k, run_suite
from .running_engine import RunningEngine
from .suite import Suite, load_suite

MEMORY = 0.1  # of a GPU, for the KV cache
MAX_SEQS = 64


def attach_suites(trainer: Trainer) -> None:
    """Let a trainer evaluate the suites of its spec (log.suites)."""
    trainer.suite_scores = SuiteScores(trainer, check_suites(trainer.spec))


def check_suites(spec: RunSpec) -> list[Suite]:
    """The suites of a spec, before anything is started."""
    if spec.parallel.world > 1:
        raise SpecError(
            "log.suites: suites are evaluated by runs of one rank; of others, evaluate checkpoints while they train: "
            "lmworks evals run RUN --step STEP --suite NAME"
        )
    if spec.adapters or spec.align.online:
        raise SpecError("log.suites: only runs that train all weights on data that is given evaluate suites")
    suites = [load_suite(name) for name in spec.log.suites]
    for suite in suites:
        if FORMATS[suite.format].task == HELD_OUT:
            raise SpecError("log.suites: the loss on held-out data is measured anyway (log.eval_every)")
        check_k(suite)
    return suites


class SuiteScores:
    def __init__(self, trainer: Trainer, suites: list[Suite]) -> None:
        self.trainer, self.suites = trainer, suites

    def __call__(self) -> dict[str, float]:
        """`eval/SUITE/METRIC` → value. Everything is kept in RUN/evals/step-N/SUITE."""
        trainer = self.trainer
        folder: Path = trainer.folder.path
        llm = live_model(trainer.model, trainer.spec, load_model_tokenizer(folder), trainer.device)
        facts = {"model": trainer.spec.name, "step": trainer.step}
        found: dict[str, float] = {}
        try:
            for suite in self.suites:
                out = unused(folder / "evals" / f"step-{trainer.step:06d}" / suite.name)
                model = EngineModel(llm, facts, fim=trainer.spec.data.fim)
                result = run_suite(model, suite, out, trainer.spec.log.suites_limit)
                found |= {f"eval/{suite.name}/{name}": one["value"] for name, one in result["metrics"].items()}
        finally:
            llm.close()
        return found


def unused(path: Path) -> Path:
    """A step that is taken again, after a restart from before it, has other weights."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def live_model(model: GPT, spec: RunSpec, tokenizer: Tokenizer, device: torch.device) -> RunningEngine:
    """An engine over a copy of weights in training."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copy = MetaModel(spec.model).blank(device, dtype)
    with torch.no_grad():
        kept = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in [*copy.named_parameters(), *copy.named_buffers()]:
            tensor.copy_(kept[name])
    options = EngineSpec(device=device.type, max_seqs=MAX_SEQS, memory=MEMORY, graphs=False)
    loaded = LoadedModel(copy.eval(), tokenizer, (), vocab_with_sentinels(tokenizer, spec.data.fim))
    return RunningEngine(make_engine(loaded, options, spec.seed), tokenizer)
