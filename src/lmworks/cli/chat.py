"""`lmworks chat`: talk with a model in the terminal, or through a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..spec.errors import SpecError
from .generate import (
    Adapter,
    Engine,
    EngineOverrides,
    MaxTokens,
    Seed,
    Source,
    Step,
    Temperature,
    TopK,
    TopP,
    open_llm,
    parse_adapters,
)

if TYPE_CHECKING:
    from ..data.chat_template import Chat, Message
    from ..engine.core.sampling_params import SamplingParams
    from ..llm import LLM

HELP = "/reset clears the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def chat(
    model: Source,
    overrides: EngineOverrides = None,
    system: Annotated[str, typer.Option("--system", help="The system message.")] = "",
    template_kwargs: Annotated[
        str, typer.Option("--chat-template-kwargs", help="Variables of the chat template, a JSON object.")
    ] = "{}",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    adapter: Adapter = None,
    step: Step = None,
    engine: Engine = "native",
) -> None:
    """Chat with a model in the terminal, or through a pipe.

    The model's own chat template is used where it has one, else a plain dialogue.

    \b
    Examples:
      lmworks chat exported/demo
      lmworks chat runs/demo --temperature 0 --max-tokens 80 --system "You write Python."
      lmworks chat models/qwen3 --chat-template-kwargs '{"enable_thinking": false}'
    """
    from ..engine.core.sampling_params import SamplingParams

    adapters, variables = parse_adapters(adapter), parse_variables(template_kwargs)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        adapter=next(iter(adapters), None),
    )
    with open_llm(model, overrides, step, engine, seed, adapters) as llm:
        ChatSession(llm, params, system, variables).run()


def parse_variables(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SpecError(f"--chat-template-kwargs {text!r:.60} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise SpecError(f"--chat-template-kwargs {text!r:.60}: a JSON object is expected")
    return found


class ChatSession:
    """One conversation: reads messages line by line, streams the answers."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str, variables: Mapping[str, Any] | None = None
    ) -> None:
        self.llm = llm
        self.chat: Chat = llm.chat(variables)
        # An answer may take up to half of the context; the rest is for what was said before.
        longest = min(params.max_tokens, max(1, llm.context // 2))
        self.params = replace(params, max_tokens=longest, stop=self.chat.stop)
        self.start: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)
        self.interactive = sys.stdin.isatty()

    def run(self) -> None:
        if self.interactive:
            typer.echo(HELP)
        while (line := self.read()) is not None:
            if line == "/quit":
                return
            if line == "/reset":
                self.messages = list(self.start)
                typer.echo("(cleared)")
            elif line.startswith("/"):
                typer.echo(f"(no such command) {HELP}")
            elif line:
                self.reply(line)

    def read(self) -> str | None:
        """The next line; None at the end. Ctrl-C at the prompt leaves, as Ctrl-D does."""
        try:
            if self.interactive:
                return input("> ").strip()
            line = sys.stdin.readline()
            return line.strip() if line else None
        except UnicodeDecodeError:
            raise SpecError("the input is not valid UTF-8") from None
        except (EOFError, KeyboardInterrupt):
            if not self.interactive:
                raise
            typer.echo("")
            return None

    def reply(self, line: str) -> None:
        """A message that cannot be answered prints an error and is dropped from the conversation."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": line}]
        try:
            ids, kept = self.chat.prompt(messages, self.llm.context - self.params.max_tokens)
            if len(kept) < len(messages):
                full = f"the context of {self.llm.context} tokens is full: the oldest messages are dropped"
                typer.echo(f"({full})", err=True)
            answer_text = self.answer(ids)
        except SpecError as error:
            typer.echo(f"({error})", err=True)
            return
        typer.echo("")
        self.messages = [*kept, {"role": "assistant", "content": answer_text}]

    def answer(self, ids: list[int]) -> str:
        """Streams the answer; Ctrl-C ends it and keeps what was printed."""
        answer_text = ""
        pieces = self.llm.stream(ids, self.params)
        try:
            for piece in pieces:
                if piece.result is not None and piece.result.error:
                    raise SpecError(piece.result.error)
                answer_text += piece.text
                typer.echo(piece.text, nl=False)
        except KeyboardInterrupt:
            typer.echo(" (stopped)", nl=False)
        finally:
            pieces.close()
        return answer_text.strip()
