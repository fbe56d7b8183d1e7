"""`lmworks generate`: generate text with a run or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.progress import activity
from ..spec.errors import LMWorksError, SpecError, near_keys, suggestion
from ..spec.load import apply_overrides
from ..spec.serving import EngineSpec
from ..weight_prefetch import prefetch_weights
from . import options
from .loading import loading
from .output import Json, as_json, uninterrupted_output, write

if TYPE_CHECKING:
    from ..engine.core.request import Answer, Result
    from ..engine.core.sampling_params import SamplingParams
    from ..llm import LLM

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder (run, Hugging Face, quantized), or a preset.",
        autocompletion=options.sources,
    ),
]
EngineOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[engine.KEY=VALUE]...",
        help="Changes to the engine, e.g. engine.dtype=bf16.",
        autocompletion=options.engine_overrides,
    ),
]
Engine = Annotated[str, typer.Option("--engine", help="native, or vllm where it is installed.")]
Step = Annotated[int | None, typer.Option("--step", help="Use the checkpoint of this step instead of the newest.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="How many tokens to add at most.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature (0: greedy).")]
TopK = Annotated[int, typer.Option("--top-k", help="Sample from the k likeliest tokens (0: all).")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample from the likeliest tokens with this total probability.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text.")]
Adapter = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="NAME=FOLDER", help="A LoRA adapter; of several, the first is the default."),
]

Prompt = str | list[int]
PromptRequest = tuple[Prompt, "SamplingParams"]  # a prompt and its sampling parameters


def generate(
    model: Source,
    overrides: EngineOverrides = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="Text to continue; may be repeated.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="A file of prompts: .txt with one a line, or .jsonl (see docs/engine.md)."),
    ] = None,
    max_tokens: MaxTokens = 64,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End the text here; may be repeated.")] = None,
    adapter: Adapter = None,
    step: Step = None,
    engine: Engine = "native",
    json: Json = False,
) -> None:
    """Generate text with a run or a Hugging Face folder.

    \b
    Examples:
      lmworks generate runs/demo --prompt "def add(a, b):" --max-tokens 48 --greedy
      lmworks generate runs/demo --prompt "import " --temperature 0.8 --top-k 50 --seed 7
      lmworks generate exported/demo engine.dtype=bf16 --prompts prompts.jsonl --n 2 --json
    """
    from ..engine.core.sampling_params import SamplingParams

    adapters = parse_adapters(adapter)
    defaults = SamplingParams(
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        n=n,
        stop=tuple(stop or ()),
        adapter=next(iter(adapters), None),
    )
    requests: list[PromptRequest] = [(text, defaults) for text in prompt or ()]
    requests += read_prompts(prompts, defaults) if prompts else []
    if not requests:
        empty = f"--prompts {prompts} holds no prompts" if prompts else "give --prompt TEXT or --prompts FILE"
        raise SpecError(f"nothing to continue: {empty}")
    check_text(prompt or ())
    with open_llm(model, overrides, step, engine, seed, adapters) as llm:
        starts = [text if text else llm.empty_prompt() for text, _ in requests]
        if len(requests) == 1:
            params = requests[0][1]
            check_prompt_length(llm, starts[0], params.max_tokens)
            if params.answers == 1 and llm.tokenizer is not None and not json:
                stream_answer(llm, requests[0][0], starts[0], params)
                return
        generate_all(llm, requests, starts, json)


def open_llm(
    model: str, overrides: Sequence[str] | None, step: int | None, engine: str, seed: int, adapters: Mapping[str, str]
) -> LLM:
    """The model with its engine, from the command's options."""
    prefetch_weights(model)
    with activity() as doing:
        doing(loading(model, step), 0, 0)
        from ..llm import LLM

        llm = LLM(model, engine=engine, step=step, seed=seed, **engine_options(overrides))
        try:
            for name, folder in adapters.items():
                llm.add_adapter(name, folder)
        except LMWorksError:
            llm.close()
            raise
    return llm


def parse_adapters(given: Sequence[str] | None) -> dict[str, str]:
    """Folders by name."""
    folders: dict[str, str] = {}
    for one in given or ():
        name, equals, folder = one.partition("=")
        if not equals or not name or not folder:
            raise SpecError(f"--adapter {one}: write NAME=FOLDER")
        if name in folders:
            raise SpecError(f"--adapter {one}: two adapters are called {name!r}; give one another name")
        folders[name] = folder
    for name, folder in folders.items():
        if not Path(folder).is_dir():
            raise SpecError(f"--adapter {name}={folder}: there is no such folder")
    return folders


def engine_options(overrides: Sequence[str] | None) -> dict[str, Any]:
    sections = apply_overrides({}, overrides or ())
    for name, value in sections.items():
        if name != "engine" or not isinstance(value, dict):
            near = suggestion(near_keys(name, EngineSpec.dotted_keys()))
            raise SpecError(f"'{name}' is no part of the engine; write engine.KEY=VALUE, e.g. engine.dtype=bf16{near}")
    return dict(sections.get("engine", {}))


# --- prompts ----------------------------------------------------------------------------------------------


def check_text(texts: Sequence[str]) -> None:
    """Bytes that are no UTF-8 reach a program as lone surrogates."""
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise SpecError("--prompt is not valid UTF-8")


def read_prompts(path: Path, defaults: SamplingParams) -> list[PromptRequest]:
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise SpecError(f"--prompts {path}: write one JSON value a line, and name it {path.stem}.jsonl")
    try:
        # Not splitlines: a JSON text may hold U+2028 and others that it takes for ends of lines.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise SpecError(f"--prompts {path}: {getattr(error, 'strerror', None) or 'not valid UTF-8'}") from None
    if suffix != ".jsonl":
        return [(line, defaults) for line in lines if line.strip()]
    return [read_request(line, f"{path}:{number}", defaults) for number, line in enumerate(lines, 1) if line.strip()]


def read_request(line: str, where: str, defaults: SamplingParams) -> PromptRequest:
    """A string, a list of ids, or an object with `prompt` and sampling parameters: {"prompt": …, "max_tokens": 5}."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise SpecError(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise SpecError(f"{where}: lists or objects within one another, too deep to be read") from None
    requests = value if isinstance(value, dict) else {"prompt": value}
    prompt = requests.pop("prompt", None)
    ids = isinstance(prompt, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in prompt)
    if not isinstance(prompt, str) and not ids:
        raise SpecError(f"{where}: expected a string, a list of token ids, or an object with such a 'prompt'")
    known = {field.name for field in fields(defaults)}
    if unknown := sorted(requests.keys() - known):
        raise SpecError(f"{where}: unknown key '{unknown[0]}'; SamplingParams has {', '.join(sorted(known))}")
    try:
        return prompt, replace(defaults, **requests)
    except (SpecError, TypeError, RecursionError) as error:
        raise SpecError(f"{where}: {error}") from None


def check_prompt_length(llm: LLM, prompt: Prompt, max_tokens: int) -> None:
    """The engine would cut the answer at the end of the context; an explicit --max-tokens is refused instead."""
    ids = llm.encode(prompt)
    room = llm.context - len(ids)
    if isinstance(ids, list) and 0 < room < max_tokens:
        raise SpecError(
            f"prompt ({len(ids)} tokens) + max tokens ({max_tokens}) exceed the model's context of {llm.context}; "
            f"at most {room} new tokens fit"
        )


# --- answers ----------------------------------------------------------------------------------------------


def stream_answer(llm: LLM, prompt: Prompt, start: Prompt, params: SamplingParams) -> None:
    begun = False
    for piece in llm.stream(start, params):
        if piece.result is not None and piece.result.error:
            raise SpecError(piece.result.error)
        if not begun:  # after the first piece: a prompt that is too long has been refused by then
            write(prompt if isinstance(prompt, str) else "", nl=False)
            begun = True
        write(piece.text, nl=False)
    write("")


def generate_all(llm: LLM, requests: Sequence[PromptRequest], starts: Sequence[Prompt], for_programs: bool) -> None:
    """Finished results are shown even after an error or Ctrl-C, before the model is closed: with ranks that takes
    seconds.
    """
    format_results = json_text if for_programs else plain_text
    results: dict[int, Result] = {}
    try:
        llm.generate(starts, [params for _, params in requests], not for_programs, results.__setitem__)
        text = format_results(requests, results)
    except BaseException as error:
        if results:
            with uninterrupted_output():
                write(format_results(requests, results, error))
        raise
    errors = [answer.error for result in results.values() for answer in result.answers]
    if len(requests) == 1 and all(errors):
        raise SpecError(errors[0])
    write(text)
    if any(errors):
        raise typer.Exit(1)


def json_text(
    requests: Sequence[PromptRequest], results: Mapping[int, Result], end: BaseException | None = None
) -> str:
    """JSON: a list with an entry for each prompt, in order, and the same keys in all of them (docs/engine.md)."""
    from ..engine.quantization.quantize import finite

    shown = [
        entry(prompt, results[place]) if place in results else unfinished_entry(prompt, end)
        for place, (prompt, _) in enumerate(requests)
    ]
    return as_json(finite(shown))  # a log-probability may be NaN


def unfinished_entry(prompt: Prompt, end: BaseException | None) -> dict[str, Any]:
    """The entry of a prompt without a result: why there is none."""
    reason, error = "cancelled", "interrupted"
    if isinstance(end, Exception):
        reason, error = "error", str(end) or type(end).__name__
    first: dict[str, Any] = {"text": "", "tokens": [], "finish_reason": reason, "logprobs": None, "error": error}
    return {"prompt": prompt, **first, "prompt_tokens": None, "prompt_logprobs": None, "answers": []}


def entry(prompt: Prompt, result: Result) -> dict[str, Any]:
    """One prompt and its answers; the fields of the first are repeated at the top level."""
    answers, known = [answer_fields(one) for one in result.answers], result.prompt_logprobs
    return {
        "prompt": prompt,
        **answers[0],
        "prompt_tokens": len(result.prompt_token_ids),
        "prompt_logprobs": None if known is None else [None if one is None else one._asdict() for one in known],
        "answers": answers,
    }


def answer_fields(answer: Answer) -> dict[str, Any]:
    """Without the stop token, as in its text."""
    tokens = answer.token_ids[:-1] if isinstance(answer.stop_reason, int) else answer.token_ids
    return {
        "text": answer.text,
        "tokens": tokens,
        "finish_reason": answer.finish_reason,
        "logprobs": None if answer.logprobs is None else [one._asdict() for one in answer.logprobs[: len(tokens)]],
        "error": answer.error or None,
    }


def plain_text(
    requests: Sequence[PromptRequest], results: Mapping[int, Result], _end: BaseException | None = None
) -> str:
    """Results in the order of prompts; token ids where the model has no tokenizer."""
    lines: list[str] = []
    for place, result in sorted(results.items()):
        prompt, answers = requests[place][0], [answer_fields(one) for one in result.answers]
        start = prompt if isinstance(prompt, str) else ""
        texts = [
            f"error: {one['error']}" if one["error"] else start + one["text"] or " ".join(map(str, one["tokens"]))
            for one in answers
        ]
        refused = all(one["error"] for one in answers)  # all alike: shown once
        lines += [f"── {place + 1} ──", *(dict.fromkeys(texts) if refused else texts)]
    return "\n".join(lines)
