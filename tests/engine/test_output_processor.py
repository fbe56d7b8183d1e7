"""How answers end: at stop strings written in byte tokens, at half a character; and what of them is given."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from fake_device import FakeDevice, TokenOutput, Work
from test_detokenizer import SENTENCES

from lmworks.data.tokenizer import ByteTokenizer, Tokenizer
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request, Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.spec import EngineSpec

SPEC = EngineSpec(block=4, blocks=64, context=64, max_seqs=8, max_batch_tokens=32)
NEWLINE = 2 + ord("\n")  # as SentencePiece has it: <0x0A>
BROKEN = 2 + 0xC3
A, B = (SENTENCES.inner.token_to_id(piece) for piece in "ab")


@dataclass
class Script(FakeDevice):
    """Answers a prompt of one token with these, again and again."""

    script: list[int] = field(default_factory=list)

    def pick(self, work: Work, tokens: list[int]) -> TokenOutput:
        self.recent[work.slot] = self.script[(work.start + len(tokens) - 1) % len(self.script)]
        return TokenOutput([self.recent[work.slot]])


def written(script: list[int], params: SamplingParams, stream: bool, tokenizer: Tokenizer = SENTENCES) -> Result:
    device = Script(SPEC, tokenizer.vocab_size, script=script)
    engine = Engine(device, tokenizer, eos=[tokenizer.eot])
    engine.add(Request([1], params, stream=stream))
    pieces = []
    while engine.busy:
        pieces += engine.step()
    result = pieces[-1].result
    assert result is not None and pieces[-1].finish_reason == result.finish_reason
    assert not stream or "".join(piece.text for piece in pieces) == result.text
    return result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "most", "text", "count"),
    [([NEWLINE], 20, "", 1), ([A, NEWLINE], 2, "a", 2), ([A, NEWLINE, B], 20, "a", 2)],
    ids=["nothing else", "with the last token", "before others"],
)
def test_a_stop_string_in_byte_tokens_ends_the_answer(
    script: list[int], most: int, text: str, count: int, stream: bool
) -> None:
    result = written(script, SamplingParams(max_tokens=most, stop="\n"), stream)
    assert (result.text, result.finish_reason, result.answers[0].stop_reason) == (text, "stop", "\n")
    assert result.token_ids == script[:count]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokenizer", [SENTENCES, ByteTokenizer()], ids=["byte tokens", "bytes"])
@pytest.mark.parametrize("most", [2, 20], ids=["length", "end of text"])
def test_stop_string_completed_at_end(tokenizer: Tokenizer, most: int, stream: bool) -> None:
    """Half a character is U+FFFD once nothing follows: the text is cut there, so that is why it ended."""
    script = [A, BROKEN, SENTENCES.eot] if tokenizer is SENTENCES else [ord("a"), 0xC3, ByteTokenizer.eot]
    result = written(script, SamplingParams(max_tokens=most, stop="\ufffd"), stream, tokenizer)
    assert (result.text, result.finish_reason, result.answers[0].stop_reason) == ("a", "stop", "\ufffd")


def test_streamed_text_equals_unstreamed() -> None:
    for script in ([A, NEWLINE, BROKEN], [NEWLINE, BROKEN, NEWLINE, A], [BROKEN]):
        whole, streamed = (written(script, SamplingParams(max_tokens=7), stream) for stream in (False, True))
        assert whole.text == streamed.text and "\ufffd" in whole.text


def test_best_of_returns_logprobs_only_on_request() -> None:
    def answers(logprobs: int | None) -> Result:
        engine = Engine(FakeDevice(SPEC))
        engine.add(Request([1, 2], SamplingParams(max_tokens=5, seed=3, n=2, best_of=6, logprobs=logprobs)))
        result = engine.run()[-1].result
        assert result is not None
        return result

    asked, not_asked = answers(0), answers(None)
    assert [each.logprobs for each in not_asked.answers] == [None, None]
    assert all(each.logprobs for each in asked.answers)
    for each, other in zip(asked.answers, not_asked.answers, strict=True):
        assert (each.token_ids, each.cumulative_logprob) == (other.token_ids, other.cumulative_logprob)
        assert each.cumulative_logprob is not None and each.cumulative_logprob < 0
