"""Templates of published models, which TRL ships with a twin that has {% generation %}: the same turns are found."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from chat_files import talk
from lmworks.data.chat_template import Message
from lmworks.data.examples import Text, common_prompt
from lmworks.data.trained_turns import TurnRenderer, Untrainable

pytestmark = pytest.mark.trl

CONFIG = {"bos_token": "<bos>", "eos_token": "<eos>"}
EQUAL = (
    *("cohere", "cohere2", "diffusion_gemma", "gemma", "gemma3", "lfm2", "llama3"),
    *("phi3", "phi3_5", "qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_instruct_2507", "qwen3_vl"),
)
# <think> is part of the prompt, or there is no end of a turn; their twins render other texts than they do.
# Idefics' contents are lists.
UNTRAINABLE = ("idefics3", "deepseekv3", "glm4moe", "nemotron_3_nano", "nemotron_3_super")
OTHER_TEXT = {  # the twin trains a header or reasoning tags that are part of the prompt
    "gptoss": ["<|channel|>final<|message|>a1<|return|>", "<|channel|>final<|message|>a2<|return|>"],
    "qwen3_5_think": ["\n</think>\n\na1<|im_end|>", "\n</think>\n\na2<|im_end|>"],
    "qwen3_5_nothink": ["a1<|im_end|>", "a2<|im_end|>"],
}


def template(name: str) -> str:
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def trained(name: str, messages: list[Message]) -> list[str]:
    source = template(name)
    special = set(re.findall(r"<[|｜]?[A-Za-z_▁]+[|｜]?>", source)) - {"<think>", "</think>"} | {"<eos>"}
    texts = TurnRenderer(source, CONFIG, special).turns(messages)
    return [one.text[start:stop] for one in texts for start, stop in one.trained]


@pytest.mark.parametrize("name", EQUAL)
def test_turns_equal_those_of_the_twin(name: str) -> None:
    """But for white space after the end-of-turn token, and Qwen 2.5's before the content."""
    said = talk("q1", "a1", "q2", "a2")
    ours, theirs = (re.sub(r"\s", "", "".join(trained(one, said))) for one in (name, f"{name}_training"))
    assert ours == theirs and ours.endswith(">")


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_templates_that_cannot_be_masked_are_refused(name: str) -> None:
    with pytest.raises(Untrainable):
        trained(name, talk("q1", "a1"))


@pytest.mark.parametrize("name", OTHER_TEXT)
def test_turns_are_those_that_follow_the_prompt(name: str) -> None:
    assert trained(name, talk("q1", "a1", "q2", "a2")) == OTHER_TEXT[name]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        (talk("q", "a", "r", "b"), talk("q", "a", "r", "c")),
        (talk("q", "a", "r", "b"), talk("q", "x", "r", "b")),
        ("The sky is blue.", "The sky is green."),
        ("The sky is blue.", "The sky isn't blue."),
    ],
)
def test_implicit_prompts_equal_those_of_trl(chosen: Text, rejected: Text) -> None:
    from trl.data_utils import extract_prompt

    theirs = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert common_prompt(chosen, rejected) == (theirs["prompt"], theirs["chosen"], theirs["rejected"])
