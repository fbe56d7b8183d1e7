"""Tokenizer and chat template of a model for post-training: where they are, and how rendered text becomes tokens."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import CheckpointError, SpecError
from ..spec.files import read_json_object
from ..spec.load import load_run
from ..spec.run import DataSpec
from .chat_template import (
    CONFIG,
    DIALOGUE,
    TEMPLATE,
    Message,
    Tools,
    around_ends,
    find_template,
    name_of,
    parse_special,
    read_config,
    template_folder,
    token_text,
)
from .index import INDEX_FILE, TOKENIZER_FILE
from .pipeline import resolve
from .sources import without_surrogates
from .tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    convert_panics,
    load_tokenizer,
    read_tokenizer,
)
from .trained_turns import Rendered, Span, TurnRenderer

if TYPE_CHECKING:
    import tokenizers

BYTES = "bytes"
EOS_FILES = ("generation_config.json", "config.json")


def tokenizer_folder(data: DataSpec, init: str) -> Path | str:
    """The folder of the tokenizer, or 'bytes': data.tokenizer, else that of checkpoint.init."""
    if data.tokenizer == BYTES:
        return BYTES
    if data.tokenizer:
        folder = Path(data.tokenizer)
        folder = folder.parent if folder.name == TOKENIZER_FILE else folder
        if not (folder / TOKENIZER_FILE).is_file() and not (folder / INDEX_FILE).is_file():
            raise SpecError(
                f"data.tokenizer = {data.tokenizer!r}: no {TOKENIZER_FILE} there; name its folder, or 'bytes'"
            )
        return own_or_bytes(folder)
    if not init:
        raise SpecError(
            "post-training needs a tokenizer: data.tokenizer names its folder (or 'bytes'), or checkpoint.init the "
            "Hugging Face or run folder that has one"
        )
    return folder_of_model(Path(init))


def folder_of_model(folder: Path) -> Path | str:
    """Of a Hugging Face folder, or of a run: the tokenizer that it keeps, or that of its data."""
    if not folder.is_dir():
        raise SpecError(f"{str(folder)!r}: there is no such folder")
    if (kept := template_folder(folder)) != folder:
        return own_or_bytes(kept)
    if (folder / "spec.toml").is_file():
        data = load_run(folder / "spec.toml").data
        return own_or_bytes(resolve(next(iter(data.sources))))
    if not (folder / TOKENIZER_FILE).is_file():
        raise SpecError(f"{folder} has no {TOKENIZER_FILE}; data.tokenizer names a folder that has one")
    return folder


def load_model_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a run."""
    found = folder_of_model(Path(folder))
    return read_model_tokenizer(found, read_config(found)) if isinstance(found, Path) else load_tokenizer(BYTES)


def own_or_bytes(folder: Path) -> Path | str:
    """Runs and prepared data on bytes have no tokenizer file."""
    return folder if (folder / TOKENIZER_FILE).is_file() else BYTES


def copy_tokenizer(data: DataSpec, init: str, into: Path) -> None:
    """Keep tokenizer and chat template in `into`, so that a fine-tuned run needs no other folder."""
    source, chat = tokenizer_folder(data, init), ChatTokenizer.open(data, init)
    into.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(source, Path):
        shutil.copyfile(source / TOKENIZER_FILE, into / TOKENIZER_FILE)
        config = read_config(source) or config
    config.pop("chat_template", None)
    (into / CONFIG).write_text(json.dumps({**config, "eos_token": chat.eos_token}, indent=2), encoding="utf-8")
    (into / EOS_FILES[0]).write_text(json.dumps({"eos_token_id": chat.stop_tokens}), encoding="utf-8")
    (into / TEMPLATE).write_text(chat.template, encoding="utf-8")


@dataclass(frozen=True)
class Encoded:
    """Token ids, and which of them are trained."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    trained_bytes: int = 0  # UTF-8 bytes of text behind them, special tokens left out

    def after(self, ids: Sequence[int]) -> Encoded:
        """With `ids`, which are not trained, before it."""
        return Encoded(
            np.concatenate([np.array(ids, np.int32), self.ids]),
            np.concatenate([np.zeros(len(ids), np.bool_), self.trained]),
            self.trained_bytes,
        )

    def __len__(self) -> int:
        return len(self.ids)


class ChatTokenizer:
    """Conversations and texts → tokens with the trained ones marked."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, config: dict[str, Any], end_tokens: Sequence[int] = ()
    ) -> None:
        """`end_tokens`: those that the model's config names beside the tokenizer's."""
        self.tokenizer, self.template, self.config, self.end_tokens = tokenizer, template, config, end_tokens
        self.eos_token = token_text(config.get("eos_token") or name_of(tokenizer, tokenizer.eot))

    @classmethod
    def open(cls, data: DataSpec, init: str) -> ChatTokenizer:
        folder = tokenizer_folder(data, init)
        home = folder if isinstance(folder, Path) else None
        if home is None and init and not data.tokenizer:
            home = template_folder(Path(init))  # of a run on bytes: a template without a tokenizer file
        config = read_config(home) if home else {}
        tokenizer = read_model_tokenizer(folder, config) if isinstance(folder, Path) else load_tokenizer(BYTES)
        template = find_template(home, config) if home else None
        if data.chat_template:
            path = Path(data.chat_template)
            try:
                template = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise SpecError(f"data.chat_template = {str(path)!r} cannot be read: {error}") from None
        ends = end_token_ids(home) if home else ()
        return cls(tokenizer, DIALOGUE if template is None else template, config, ends)

    @cached_property
    def renderer(self) -> TurnRenderer:
        config = {**self.config, "eos_token": self.eos_token}
        return TurnRenderer(self.template, config, self.special_names)

    @cached_property
    def special_names(self) -> tuple[str, ...]:
        if not isinstance(self.tokenizer, FileTokenizer):
            return (END_OF_TEXT,)
        added = self.tokenizer.inner.get_added_tokens_decoder().values()
        return (*(token.content for token in added if token.special), self.eos_token)

    @property
    def digest(self) -> str:
        """Of all that the tokens of an example depend on beside the example."""
        text = self.tokenizer.inner.to_str() if isinstance(self.tokenizer, FileTokenizer) else BYTES
        rules = json.dumps([text, self.tokenizer.eot, self.template, self.config], sort_keys=True)
        return hashlib.sha256(rules.encode()).hexdigest()

    @cached_property
    def stop_tokens(self) -> list[int]:
        """Tokens that end an answer: end-of-text, those that the model names, and the template's end of a turn."""
        return list(dict.fromkeys([self.tokenizer.eot, *self.end_tokens, *self.end_of_turn()]))

    def end_of_turn(self) -> list[int]:
        """The special token after the content of an assistant turn; empty where the template has none."""
        asked, answered = "Well?", "Fine."
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        try:
            text = self.renderer.conversation(messages)
        except SpecError:
            return []
        after = self.renderer.special.search(text, text.rfind(answered)) if answered in text else None
        return self.encode(after.group())[:1] if after else []

    # --- tokens -------------------------------------------------------------------------------------------

    @cached_property
    def inner(self) -> Any:
        return parse_special(self.tokenizer) if isinstance(self.tokenizer, FileTokenizer) else None

    @cached_property
    def begin(self) -> list[int]:
        """Tokens that the model expects at the beginning of a text without a template."""
        if self.inner is None:
            return []
        bare, whole = (self.inner.encode("a", add_special_tokens=add).ids for add in (False, True))
        return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(bare)] == bare), [])

    def encode(self, text: str) -> list[int]:
        """Names of special tokens in a rendered text are those tokens."""
        text = without_surrogates(text)
        return around_ends(self.tokenizer, text) if self.inner is None else list(self.encoding(text).ids)

    def encoding(self, text: str) -> tokenizers.Encoding:
        with convert_panics("the tokenizer cannot encode this text"):
            return self.inner.encode(text, add_special_tokens=False)

    def turns(self, messages: Sequence[Message], tools: Tools, first: int = 0) -> list[Encoded]:
        """A conversation of which the assistant turns from message `first` on are trained; several texts where the
        template shows earlier turns in another way."""
        return [self.encode_rendered(one) for one in self.renderer.turns(messages, tools, first)]

    def encode_rendered(self, rendered: Rendered) -> Encoded:
        """A token is trained where any of its characters is."""
        text = without_surrogates(rendered.text)  # of the same length
        if self.inner is None:
            ids, trained = encode_bytes(text, rendered.trained)
        else:
            encoding = self.encoding(text)
            ids, trained = encoding.ids, np.zeros(len(encoding), np.bool_)
            for start, stop in rendered.trained:
                trained[tokens_of(encoding, start, stop)] = True
        parts = (self.renderer.special.sub("", text[start:stop]) for start, stop in rendered.trained)
        return Encoded(np.array(ids, np.int32), trained, sum(len(part.encode()) for part in parts))

    def answer(self, prompt: str, rendered: Rendered) -> Encoded:
        """A text that begins with `prompt`, and so do its tokens: where a token would reach over the end of the prompt,
        both parts are tokenized alone."""
        whole, head = self.encode_rendered(rendered), self.encode(prompt)
        if whole.ids[: len(head)].tolist() == head:
            return whole
        rest = Rendered(
            rendered.text[len(prompt) :],
            tuple((max(0, start - len(prompt)), stop - len(prompt)) for start, stop in rendered.trained),
        )
        return self.encode_rendered(rest).after(head)

    def completion(self, prompt: str, completion: str) -> Encoded:
        """Without a template: begin-of-text, prompt, completion, end-of-text; the last two are trained."""
        end = "" if completion.endswith(self.eos_token) else self.eos_token
        text = prompt + completion + end
        return self.answer(prompt, Rendered(text, ((len(prompt), len(text)),))).after(self.begin)


def tokens_of(encoding: tokenizers.Encoding, start: int, stop: int) -> slice:
    """The tokens of characters [start, stop); a character may have several, or, dropped by a normalizer, none."""
    chars = range(start, stop)
    first = next((token for char in chars if (token := encoding.char_to_token(char)) is not None), None)
    last = next((token for char in reversed(chars) if (token := encoding.char_to_token(char)) is not None), None)
    if first is None or last is None:
        return slice(0, 0)
    while last + 1 < len(encoding) and (span := encoding.token_to_chars(last + 1)) and span[0] < stop:
        last += 1
    return slice(first, last + 1)


def encode_bytes(text: str, spans: Sequence[Span]) -> tuple[list[int], NDArray[np.bool_]]:
    """With the byte tokenizer, piece by piece: every character has tokens of its own."""
    ids: list[int] = []
    trained: list[NDArray[np.bool_]] = []
    for start, stop in pairwise([0, *(place for span in spans for place in span), len(text)]):
        piece = around_ends(ByteTokenizer(), text[start:stop])
        ids += piece
        trained.append(np.full(len(piece), (start, stop) in spans))
    return ids, np.concatenate(trained)


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end an answer, as `transformers` reads them from a model's folder; the first is its end-of-text."""
    for path in (folder / file for file in EOS_FILES):
        found = read_json_object(path, SpecError).get("eos_token_id") if path.is_file() else None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token) is int for token in ids):
            raise CheckpointError(f"{path}: eos_token_id = {found!r:.60}: a token id, or a list, is expected")
        return tuple(ids)
    return ()


def read_model_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """With the end-of-text of the tokenizer's config, else that of the model's, else of a prepared folder."""
    if (folder / INDEX_FILE).is_file():
        return load_tokenizer(folder)
    if name := config.get("eos_token"):
        return read_tokenizer(folder / TOKENIZER_FILE, token_text(name))
    ends = end_token_ids(folder)
    return read_tokenizer(folder / TOKENIZER_FILE, ends[0]) if ends else load_tokenizer(folder)
