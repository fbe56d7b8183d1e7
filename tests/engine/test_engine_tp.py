"""Two ranks that share every layer answer as one does, and as transformers does; and no rank outlives rank 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_reference import VOCAB, compare, random_prompts, reference_model

from lmworks import LLM, SamplingParams
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.quantization.quantized_model import MetaModel
from lmworks.engine.tensor_parallel import executor
from lmworks.engine.tensor_parallel.executor import CopiesUnderWay, Executor, WorkerExits, WorkerReplies
from lmworks.engine.tensor_parallel.tp_shards import check_tp_divides
from lmworks.model import GPT
from lmworks.spec import LMWorksError, ModelSpec, SpecError
from tiny import make_spec, train

LENGTHS = [5, 1, 33, 17, 2, 40, 9, 26]
COUNTS = [20, 30, 12, 25, 8, 20, 1, 16]
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "block": 4, "max_seqs": 4, "max_batch_tokens": 11}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    reference_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def lead_of(llm: LLM) -> Executor:
    runner = llm.native.runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.tp_rank, Executor)
    return runner.tp_rank


class Behind:
    """A runner that is read one step behind: tokens go on from step to step where the host does not know them."""

    synchronous = False

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


each_way = pytest.mark.parametrize(  # of two ranks: tests/engine/test_rank_group.py has every shape of a model
    ("family", "speculate"),
    [
        pytest.param("llama", "none", marks=pytest.mark.slow),
        pytest.param("qwen3", "ngram", marks=pytest.mark.slow),
        ("gpt2", "draft"),
        pytest.param("deepseek_v3", "none", marks=pytest.mark.slow),
    ],
)


def compare_two_ranks(family: str, speculate: str, folder: Path, device: str) -> int:
    """Batching, prompts in chunks, prefix hits, preemption, several answers; with guesses of either kind."""
    reference_model(family).save_pretrained(folder)
    draft = {"draft": str(folder)} if speculate == "draft" else {}
    with LLM(folder, tp=2, blocks=22, speculate=speculate, **draft, **{**SMALL, "device": device}) as llm:
        engine, prompts = llm.native, random_prompts(LENGTHS, seed=1, prefix=9)
        excused = compare(engine, family, prompts, COUNTS)
        engine.runner = Behind(engine.runner)  # as it is on a GPU
        excused += compare(engine, family, prompts, COUNTS)
        excused += compare(engine, family, prompts[:1], [12], n=3)
        metrics = engine.metrics
        assert metrics.num_preemptions > 0
        assert metrics.prefix_cache_hits > 0
        assert (metrics.accepted_guesses > 0) == (speculate != "none")
        return excused


@pytest.mark.usefixtures("forked_python")
@each_way
def test_equal_to_transformers(family: str, speculate: str, tmp_path: Path) -> None:
    assert compare_two_ranks(family, speculate, tmp_path, "cpu") == 0


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("trait", ["model.positions=alibi", "model.attention_sinks=true"])
def test_run_folder_with_two_ranks(trait: str, dataset: Path, tmp_path: Path) -> None:
    """From a run folder; two ranks have queries of one key head, and each knows the slopes or sinks of its own queries.

    Log-probabilities of prompts too, and requests that are refused or come to nothing.
    """
    train(make_spec(dataset, trait, "model.init_std=0.5"), tmp_path / "run")
    prompts = [[7, 8, 9] * 3, [], [1, 2, 3, 4, 5], [600]]
    wishes = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    params = SamplingParams(**wishes, logprobs=2, prompt_logprobs=0)
    with LLM(tmp_path / "run", **SMALL) as llm:
        alone = llm.generate(prompts, params)
    with LLM(tmp_path / "run", tp=2, **SMALL) as llm:
        with pytest.raises(SpecError, match=r"engine.tp = 2: torch.distributed is in use already"):
            LLM(tmp_path / "run", tp=2, **SMALL)
        shared = llm.generate(prompts, params)
    assert [result.finish_reason for result in shared] == ["length", "error", "length", "error"]
    for one, two in zip(alone, shared, strict=True):
        assert (one.token_ids, one.error) == (two.token_ids, two.error)
        for which in ("logprobs", "prompt_logprobs"):
            values = [[each.logprob for each in getattr(r, which) or [] if each] for r in (one, two)]
            assert values[0] == pytest.approx(values[1], abs=1e-5)


def alive(pid: int) -> bool:
    try:  # a process that nobody has waited for is no longer one
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within: float = 20) -> bool:
    end = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


SERVE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from lmworks import LLM, SamplingParams
with ThreadPoolExecutor(1) as loader:  # its thread ends, and the workers stay
    llm = loader.submit(LLM, sys.argv[1], tp=2, device="cpu", dtype="fp32", blocks=100).result()
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=50))
print(*[process.pid for process in llm.native.runner.tp_rank.workers], flush=True)
while True:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=50))
"""


@pytest.mark.slow  # starts PyTorch twice; tests/serve/test_engine_process.py kills a server
@pytest.mark.parametrize("how", ["runs", "is stopped"])
def test_workers_exit_when_rank_0_is_killed(how: str, llama: Path) -> None:
    """In the middle of its work, without a chance to say so; the kernel ends a worker that is stopped."""
    command = [sys.executable, "-c", SERVE, str(llama)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pids = [int(pid) for pid in server.stdout.readline().split()]
        assert len(pids) == 1
        assert alive(pids[0])
        if how == "is stopped":
            os.kill(pids[0], signal.SIGSTOP)
        server.send_signal(signal.SIGKILL)
    left = not gone(pids)
    if left:  # it would outlive the tests
        os.kill(pids[0], signal.SIGKILL)
    assert not left


def greedy(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    return [result.token_ids for result in llm.generate([[1, 2, 3], [4, 5, 6, 7, 8]], params)]


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_worker_exit_is_reported(how: str, tmp_path: Path) -> None:
    """Of a model with experts, which two ranks share like the rest."""
    shape = {"layers": 2, "hidden": 48, "heads": 4, "vocab": VOCAB, "context": 64, "experts": 4, "expert_ffn": 32}
    GPT(ModelSpec.from_dict({**shape, "init_std": 0.2}), seed=1).save_hf(tmp_path)
    with LLM(tmp_path, **SMALL) as llm:
        alone = greedy(llm)
    llm = LLM(tmp_path, tp=2, **SMALL)
    assert greedy(llm) == alone
    executor = lead_of(llm)
    (follower,) = executor.workers
    if how == "raises":
        executor.send(1, "a step")
        says = "rank 1: AttributeError: 'str' object has no attribute"
    else:
        assert not llm.native.runner.failed_worker()
        follower.kill()
        says = "rank 1: it ended with exit code -9"
        while not llm.native.runner.failed_worker():  # known without another step
            time.sleep(0.01)
        assert llm.native.runner.failed_worker() == says
    with pytest.raises(LMWorksError, match=says):
        greedy(llm)
    with pytest.raises(LMWorksError, match="the engine has stopped after an error: rank 1"):
        greedy(llm)
    llm.close()
    assert gone([follower.pid])


def test_worker_that_never_starts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short_lived() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"], stdin=pipe, stdout=pipe)

    monkeypatch.setattr(executor, "start_worker", short_lived)
    with pytest.raises(LMWorksError, match="rank 1: it ended with exit code 3"):
        LLM(llama, tp=2, **SMALL)


def test_first_failed_worker_is_root_cause() -> None:
    """Others hear of it when a peer's connection is closed, and end too."""

    def follower(command: str) -> Callable[[], subprocess.Popen[bytes]]:
        return lambda: subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE)

    executor = Executor.__new__(Executor)
    executor.exits = WorkerExits()
    executor.copies = CopiesUnderWay(3)
    killed = WorkerReplies(2, follower("kill -9 $$"), executor.exits, executor.copies)
    assert killed.answers.get() == "it ended with exit code -9"
    last_words = """echo '{"error": "connection closed by peer", "last": true}'"""
    other = WorkerReplies(1, follower(last_words), executor.exits, executor.copies)
    assert other.answers.get() == "connection closed by peer"
    for _ in range(2):
        assert str(executor.root_cause(OSError("broken pipe"))) == "rank 2: it ended with exit code -9"


def test_indivisible_tp_is_rejected() -> None:
    with pytest.raises(SpecError, match=r"engine.tp = 3 does not divide the model's heads = 4"):
        check_tp_divides(MetaModel(ModelSpec.from_preset("tiny", heads=4)), 3)
    odd = ModelSpec.from_preset("tiny", hidden=192, heads=12, kv_heads=3, vocab=512, ffn=256)
    with pytest.raises(SpecError, match=r"engine.tp = 4 and the model's kv_heads = 3: one must divide the other"):
        check_tp_divides(MetaModel(odd), 4)
