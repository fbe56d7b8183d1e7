"""The offline API: sources, prompts and results, against `transformers` and against the model itself."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import lmworks
from lmworks import LLM, SamplingParams, loading
from lmworks.engine.core.request import Answer, OutputDelta, Request, Result
from lmworks.engine.offline import OfflineEngine
from lmworks.model import GPT, generate
from lmworks.spec import CheckpointError, EngineSpec, LMWorksError, ModelSpec, SpecError
from tiny import make_spec, train

transformers = pytest.importorskip("transformers")

GREEDY = SamplingParams(temperature=0, max_tokens=12)
EOS = 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights in bf16, whose tokenizer puts a begin-of-text in front, as Llama's does."""
    path = tmp_path_factory.mktemp("hf")
    model, draw = GPT(ModelSpec.from_preset("tiny"), seed=1), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2, generator=draw)
    model.to(torch.bfloat16).save_hf(path, eos=EOS)
    alphabet = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|begin|>"), AddedToken("<|finish|>")])  # ids 256 and 257
    inner.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 256)])
    inner.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, dtype="fp32")


@pytest.fixture(scope="module")
def preset() -> LLM:
    return LLM("tiny", seed=3)


def ids_of(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


# --- sources ----------------------------------------------------------------------------------------------


def test_text_generation_equals_transformers(llm: LLM, folder: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    prompts = ["def f(x):", "naïve", "<|finish|>?"]
    results = llm.generate(prompts, GREEDY)
    for prompt, result in zip(prompts, results, strict=True):
        # Special tokens that a text merely mentions are text to us; their tokenizer is told so.
        ids = tokenizer(prompt, split_special_tokens=True)["input_ids"]
        out = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, eos_token_id=EOS, pad_token_id=0)
        assert result.prompt_token_ids == ids and ids[0] == 256
        assert result.token_ids == out[0, len(ids) :].tolist()
        ended = result.finish_reason == "stop"
        assert result.text == tokenizer.decode(result.token_ids[: -1 if ended else None], skip_special_tokens=True)


def test_eos_of_config_ends_answer(llm: LLM) -> None:
    forced = SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS: 100.0})
    (result,) = llm.generate(["x"], forced)
    assert (result.finish_reason, result.token_ids, result.text) == ("stop", [EOS], "")


def test_preset_has_initial_weights_of_training(preset: LLM) -> None:
    prompt = [5, 6, 7]
    expected = generate(GPT(ModelSpec.from_preset("tiny"), seed=3), torch.tensor([prompt]), 12)[0, 3:].tolist()
    assert ids_of(preset.generate([prompt], GREEDY)) == [expected]


def test_run_is_served(dataset: Path, tmp_path: Path) -> None:
    trainer = train(make_spec(dataset), tmp_path / "run")
    with LLM(tmp_path / "run") as llm:
        prompt = list(b"def x")
        (result,) = llm.generate(["def x"], GREEDY)
        logits = trainer.model(torch.tensor([prompt + result.token_ids[:-1]]))[0, len(prompt) - 1 :, :257]
        assert result.prompt_token_ids == prompt and result.token_ids == logits.argmax(dim=-1).tolist()


def test_run_is_served_on_engine_device(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it was trained; the meta device stands for any other."""
    train(make_spec(dataset), tmp_path / "run")
    with pytest.raises(SpecError, match=r"'cuda:1': choose a GPU with CUDA_VISIBLE_DEVICES"):
        loading.pick_device(EngineSpec(device="cuda:1"))
    monkeypatch.setattr(loading, "pick_device", lambda spec: torch.device("meta"))
    assert loading.load(tmp_path / "run", EngineSpec(), None, 0).model.device.type == "meta"


def test_quantized_folder_is_served(dataset: Path, tmp_path: Path) -> None:
    """int8 rounds to nearest, so the served tokens are those of the network with its weights rounded by hand."""
    from lmworks.cli.quantize import quantize
    from lmworks.engine.quantization.quantized_model import apply_quantization

    trainer = train(make_spec(dataset), tmp_path / "run")
    quantize(tmp_path / "run", "int8", tmp_path / "small", limit=10.0)
    with LLM(tmp_path / "small") as llm:
        assert llm.native.runner.valid_vocab == 257  # of 320 rows, as of the run
        (result,) = llm.generate(["def x"], GREEDY)
    model = apply_quantization(trainer.model.eval(), "int8")
    with torch.no_grad():
        logits = model(torch.tensor([list(b"def x") + result.token_ids[:-1]]))[0, 4:]
    assert result.prompt_token_ids == list(b"def x") and result.token_ids == logits.argmax(dim=-1).tolist()
    with pytest.raises(SpecError, match="vLLM reads Hugging Face folders"):
        LLM(tmp_path / "small", engine="vllm")


def test_quantized_folder_keeps_eos_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    """The token that ends a text has no common name here: only the config tells."""
    from lmworks.cli.quantize import quantize

    (tmp_path / "text.txt").write_text("def f(x): return x + 1\n" * 200)
    quantize(folder, "int8", tmp_path / "small", calibration=str(tmp_path / "text.txt"), tokens=2048, limit=10.0)
    with LLM(tmp_path / "small", dtype="fp32") as llm:
        assert llm.empty_prompt() == [EOS]
        forced = SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS: 100.0})
        (result,) = llm.generate(["x"], forced)
        assert (result.prompt_token_ids[0], result.finish_reason, result.token_ids) == (256, "stop", [EOS])


@pytest.mark.parametrize("options", [{"speculate": "ngram"}, {"speculate": "draft", "draft": "tiny"}])
def test_speculation_keeps_tokens(preset: LLM, options: dict[str, Any]) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    params = SamplingParams(temperature=0, max_tokens=30)
    with LLM("tiny", seed=3, **options) as guessing:
        assert ids_of(guessing.generate(prompts, params)) == ids_of(preset.generate(prompts, params))
        assert guessing.native.metrics.accepted_guesses > 0


def test_vllm_backend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Theirs:
        def __init__(self, path: str, spec: Any, seed: int) -> None:
            asked.update(path=path, spec=spec, seed=seed)
            self.context = 99

        def generate(self, prompts: Any, params: Any, progress: bool, on_result: Any) -> list[Result]:
            asked.update(prompts=prompts, params=params)
            return [Result(prompt, [Answer([7], "x", "length")]) for prompt in prompts]

        def close(self) -> None:
            asked["closed"] = True

    monkeypatch.setattr("lmworks.llm.VLLM", Theirs)
    with LLM(folder, engine="vllm", seed=5, max_seqs=3) as llm:
        first, bad = llm.generate(["ab", [1, 2]], [GREEDY, SamplingParams()])
        assert llm.context == 99
        with pytest.raises(SpecError, match="an engine of its own"):
            _ = llm.native
    assert (asked["path"], asked["seed"], asked["spec"].max_seqs) == (str(folder), 5, 3)
    assert asked["prompts"] == [llm.encode("ab"), [1, 2]] and asked["params"] == [GREEDY, SamplingParams()]
    assert first.token_ids == bad.token_ids == [7] and asked["closed"]


def test_on_result_is_called_as_results_complete(preset: LLM) -> None:
    """Once each and by place: the one that is refused first, the longest last."""
    found: list[tuple[int, Result]] = []
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 3, 1, 6)]
    results = preset.generate([[1], [2], [], [3]], params, on_result=lambda *each: found.append(each))
    assert [place for place, _ in found] == [2, 1, 3, 0]
    assert all(results[place] is result for place, result in found)


def test_earlier_name_of_on_result(preset: LLM) -> None:
    found: list[int] = []
    preset.generate([[1], [2]], SamplingParams(max_tokens=2), told=lambda index, _result: found.append(index))
    assert sorted(found) == [0, 1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tell'"):
        preset.generate([[1]], tell=found.append)


def test_exception_in_on_result_keeps_finished_results(preset: LLM) -> None:
    """All end in one step: the others are handed over, and the engine is as it was."""
    seen: list[int] = []

    def on_result(place: int, _result: Result) -> None:
        seen.append(place)
        if len(seen) == 1:
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        preset.generate([[1], [2], [3], [4]], SamplingParams(max_tokens=2, ignore_eos=True), on_result=on_result)
    assert sorted(seen) == [0, 1, 2, 3]
    assert isinstance(preset.backend, OfflineEngine)
    assert not preset.backend.queues
    assert not preset.native.busy


def test_second_interrupt_cancels_all_requests(preset: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = preset.backend
    assert isinstance(backend, OfflineEngine)
    step, leave, left = backend.engine.step, backend.remove, 0

    def interrupted() -> list[OutputDelta]:
        signal.raise_signal(signal.SIGINT)
        return step()

    def again(request: Request, finished: bool) -> None:
        nonlocal left
        left += 1
        if left == 2:
            signal.raise_signal(signal.SIGINT)
        leave(request, finished)

    monkeypatch.setattr(backend.engine, "step", interrupted)
    monkeypatch.setattr(backend, "remove", again)
    with pytest.raises(KeyboardInterrupt):
        preset.generate([[1], [2], [3], [4]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert left == 4
    assert not backend.queues
    assert not preset.native.scheduler.running


def test_package_exports() -> None:
    assert {"LLM", "SamplingParams"} <= set(dir(lmworks))
    assert lmworks.SamplingParams is SamplingParams


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("llama3-8x", {}, "llama3-8x is neither a folder nor a preset; did you mean .llama3-8b.?"),
        (Path(__file__).parent, {}, r"holds no model: neither spec\.toml .* nor config\.json"),
        ("tiny", {"blocks": 10**11}, r"a cache of 100,000,000,000 blocks takes [0-9,.]+ GiB.*lower engine\.blocks"),
        ("tiny", {"max_seq": 3}, "unknown key 'engine.max_seq'; did you mean 'max_seqs'"),
        ("tiny", {"engine": "sglang"}, "engine = 'sglang' is not one of: native, vllm"),
        ("tiny", {"engine": "vllm"}, "vLLM reads Hugging Face folders"),
        ("tiny", {"device": "tpu0"}, "engine.device"),
        ("tiny", {"device": "meta"}, "engine.device"),
        ("tiny", {"context": 4096}, "more than the model's context of 128"),
        ("tiny", {"speculate": "draft", "draft": "tini"}, "engine.draft: tini is neither a folder nor a preset"),
    ],
)
def test_unloadable_source_errors(source: str | Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(LMWorksError, match=said):
        LLM(source, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("eos", ["two", 2.0, [1, None], True])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_invalid_eos_error(eos: Any, file: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    described = json.loads((folder / "config.json").read_text()) if file == "config.json" else {}
    (tmp_path / "hf" / file).write_text(json.dumps({**described, "eos_token_id": eos}))
    with pytest.raises(CheckpointError, match=rf"{file}: eos_token_id = .*: a token id, or a list, is expected"):
        LLM(tmp_path / "hf")


def test_missing_gpu_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LMWorksError, match="there is no CUDA device"):
        LLM("tiny", device="cuda")


def test_step_of_non_run_error(folder: Path) -> None:
    for source in (folder, "tiny"):
        with pytest.raises(SpecError, match="no checkpoints by step"):
            LLM(source, step=3)


# --- prompts and results ----------------------------------------------------------------------------------


def test_results_are_in_order(preset: LLM) -> None:
    prompts = [[place, place + 1] for place in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (7 * place) % 20) for place in range(20)]
    results = preset.generate(prompts, params)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [len(result.token_ids) for result in results] == [one.max_tokens for one in params]


def test_bad_prompt_fails_alone(preset: LLM) -> None:
    alone = ids_of(preset.generate([[1, 2]], GREEDY))[0]
    bad = {"empty": [], "only 128|context = 128": [1] * 128, "token 320": [320], "token -1": [-1], "no tokenizer": "x"}
    results = preset.generate([[1, 2], *bad.values(), [1, 2]], GREEDY)
    assert results[0].token_ids == results[-1].token_ids == alone
    for said, result in zip(bad, results[1:-1], strict=True):
        assert result.finish_reason == "error" and result.token_ids == [] and result.error
        assert any(part in result.error for part in said.split("|")), result.error


@pytest.mark.parametrize("prompt", [None, [1.5], ["a", "b"], 7, "\ud800", b"abc", [True, False]])
def test_invalid_prompt_error(llm: LLM, prompt: Any) -> None:
    good, bad = llm.generate(["x", prompt], GREEDY)
    assert len(good.token_ids) == 12 and bad.finish_reason == "error"
    assert "a text or a list of token ids" in str(bad.error) or "not a valid text" in str(bad.error)
    with pytest.raises(SpecError):
        llm.stream(prompt, GREEDY)


def test_host_memory_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda: 500_000)
    with pytest.raises(LMWorksError, match=r"weights of tiny take 0\.0 GiB.*bf16"):
        LLM("tiny", device="cpu", dtype="fp32")
    LLM("tiny", device="cpu", dtype="bf16").close()  # 2 bytes each of 139,584 weights


def test_source_type_error() -> None:
    with pytest.raises(SpecError, match="not by None"):
        LLM(None)  # type: ignore[arg-type]


def test_numpy_ids(preset: LLM) -> None:
    import numpy as np

    expected = ids_of(preset.generate([[7, 8]], GREEDY))
    assert ids_of(preset.generate([np.array([7, 8])], GREEDY)) == expected
    for lone in (np.array([7, 8]), torch.tensor([7, 8])):
        assert ids_of(preset.generate(lone, GREEDY)) == expected  # type: ignore[arg-type]
    two = [torch.tensor([7]), torch.tensor([8])]
    assert len(preset.generate(two, GREEDY)) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [None, 7, {"a": 1}, b"abc"])
def test_invalid_prompts_error(preset: LLM, prompts: Any) -> None:
    with pytest.raises(SpecError, match="prompts are texts and lists of token ids, not"):
        preset.generate(prompts, GREEDY)


def test_single_prompt(llm: LLM, preset: LLM) -> None:
    assert ids_of(preset.generate([7, 8], GREEDY)) == ids_of(preset.generate([[7, 8]], GREEDY))
    assert ids_of(llm.generate("abc", GREEDY)) == ids_of(llm.generate(["abc"], GREEDY))
    assert preset.generate([], GREEDY) == []
    assert ids_of(llm.generate((text for text in ("abc",)), GREEDY)) == ids_of(llm.generate(["abc"], GREEDY))  # type: ignore[arg-type]


def test_params_one_for_all_or_one_each(preset: LLM) -> None:
    with pytest.raises(SpecError, match="2 SamplingParams for 3 prompts"):
        preset.generate([[1], [2], [3]], [GREEDY, GREEDY])
    wrong: Any
    for wrong in ({"max_tokens": 3}, [{"max_tokens": 3}], "x"):
        with pytest.raises(SpecError, match=r"params are SamplingParams\(…\), one for all or one each, not"):
            preset.generate([[1]], wrong)
        with pytest.raises(SpecError, match="params are SamplingParams"):
            preset.stream([1], wrong)


def test_stream_equals_result_with_concurrent_requests(llm: LLM) -> None:
    (whole,) = llm.generate(["stream"], GREEDY)
    stream = llm.stream("stream", GREEDY)
    pieces = [next(stream)]
    assert ids_of(llm.generate(["stream"], GREEDY)) == [whole.token_ids]  # in between
    pieces += stream
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].result is not None and pieces[-1].result.token_ids == whole.token_ids


def test_threads_share_engine(preset: LLM) -> None:
    """Each has its own results, and their requests run in the same steps."""
    prompts = [[thread, place] for thread in range(4) for place in range(3)]
    expected = ids_of(preset.generate(prompts, GREEDY))
    before = preset.native.metrics.steps
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda thread: preset.generate(prompts[3 * thread : 3 * thread + 3], GREEDY), range(4)))
    assert [ids for results in found for ids in ids_of(results)] == expected
    assert preset.native.metrics.steps - before < 4 * 12


def test_closed_llm_error() -> None:
    with LLM("tiny") as llm:
        llm.generate([[1]], GREEDY)
    llm.close()
    uses: list[Callable[[], Any]] = [
        lambda: llm.generate([[1]], GREEDY),
        lambda: llm.stream([1], GREEDY),
        lambda: llm.add_adapter("a", "folder"),
        lambda: llm.context,
    ]
    for use in uses:
        with pytest.raises(LMWorksError, match="was closed"):
            use()


def test_close_ends_open_stream() -> None:
    with LLM("tiny") as llm:
        pieces, others = (llm.stream([1, 2], SamplingParams(max_tokens=50)) for _ in range(2))
        next(pieces), next(others)
    with pytest.raises(LMWorksError, match="was closed"):
        next(pieces)
    others.close()


def test_failed_result_has_n_answers(preset: LLM) -> None:
    results = preset.generate(["no tokenizer", []], SamplingParams(n=3))
    assert [len(result.answers) for result in results] == [3, 3]


def test_closing_stream_frees_blocks(preset: LLM) -> None:
    for number, _ in enumerate(preset.stream([1, 2, 3], SamplingParams(max_tokens=100))):
        if number == 2:
            break
    else:
        raise AssertionError
    assert not preset.native.requests and preset.native.scheduler.block_manager.num_used_blocks == 0


def test_garbage_collected_stream_during_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is looked for wherever something is allocated, on the thread that has the engine."""
    with LLM("tiny", device="cpu", block=2) as llm:
        held: list[Any] = [llm.stream([1, 2, 3], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))]
        next(held[0])
        held.append(held)  # a cycle
        del held
        pool = llm.native.scheduler.block_manager
        allocate, asked = pool.allocate, iter(range(1000))

        def collecting(count: int) -> list[int]:
            if next(asked) == 2:
                gc.collect()
            return allocate(count)

        monkeypatch.setattr(pool, "allocate", collecting)
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        assert len(llm.generate([[5, 6]], params)[0].token_ids) == 20
        assert not llm.native.requests and pool.num_used_blocks == 0


def test_interrupt_cancels_requests(preset: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = preset.native, 0
    take = engine.step

    def interrupted() -> object:
        nonlocal steps
        steps += 1
        if steps == 4:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C in the middle of a step
        return take()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preset.generate([[1, 2], [3, 4]], SamplingParams(max_tokens=50))
    monkeypatch.undo()
    assert not engine.requests and engine.failure is None
    assert len(preset.generate([[1, 2]], GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_interrupt_during_admission_cancels_requests(how: str, preset: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that is asked for may take a second to compile: time enough for Ctrl-C."""
    engine, added = preset.native, 0
    take_in = engine.add

    def interrupted(request: Request) -> None:
        nonlocal added
        added += 1
        if added == (2 if how == "generate" else 1):
            signal.raise_signal(signal.SIGINT)
        take_in(request)

    monkeypatch.setattr(engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        if how == "generate":
            preset.generate([[1, 2], [3, 4], [5, 6]], SamplingParams(max_tokens=50))
        else:
            next(preset.stream([1, 2], SamplingParams(max_tokens=50)))
    monkeypatch.undo()
    assert not engine.requests and engine.failure is None and engine.scheduler.block_manager.num_used_blocks == 0
    assert len(preset.generate([[1, 2]], GREEDY)[0].token_ids) == 12


def test_no_progress_bar_without_terminal(
    preset: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset.generate([[1]], GREEDY)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    preset.generate([[1], [2]], GREEDY)
    assert "2/2" in capsys.readouterr().err
    preset.generate([[1], [2]], GREEDY, progress=False)
    assert capsys.readouterr().err == ""


def test_seeds(preset: LLM) -> None:
    wild = SamplingParams(temperature=1.5, max_tokens=12, seed=1)
    first, again = (ids_of(preset.generate([[1, 2]], wild)) for _ in range(2))
    unseeded = SamplingParams(temperature=1.5, max_tokens=12)
    assert first == again
    assert ids_of(preset.generate([[1, 2]], unseeded)) != ids_of(preset.generate([[1, 2]], unseeded))


@pytest.mark.parametrize(
    ("source", "said"), [("tiny", "tp = 3 does not divide the model's"), ("nowhere", "neither a folder nor a preset")]
)
def test_indivisible_tp_starts_no_workers(source: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.engine.tensor_parallel.executor.Executor", None)  # calling it would be a TypeError
    with pytest.raises(SpecError, match=said):
        LLM(source, tp=3)
