"""`lmworks serve RUN --chat-template FILE`: a run of one's own, which came without a template, takes tools."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from api_server import until
from openai import OpenAI

from lmworks import checkpoint
from lmworks.model import GPT
from lmworks.record import RunFolder
from tiny import make_spec

ROOT = Path(__file__).parents[2]
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


@pytest.mark.usefixtures("forked_python")
def test_chat_template_option(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "model.context=512")
    run = RunFolder.create(tmp_path / "mine", spec)
    state = {"model": GPT(spec.model, seed=1).state_dict()}
    checkpoint.save(run.checkpoints, 1, state, {"spec": spec.to_dict(), "cursor": 1})
    template = tmp_path / "tools.jinja"
    (documented,) = re.findall(
        r"^```jinja\n(.*?)^```", (ROOT / "docs/serving.md").read_text(), re.DOTALL | re.MULTILINE
    )
    template.write_text(documented + "{{ mood }}{{ eos_token }}", encoding="utf-8")
    words = ["serve", str(tmp_path / "mine"), "--chat-template", str(template), "--port", "0"]
    process = subprocess.Popen([sys.executable, "-m", "lmworks", *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = next(line.split()[0] for line in process.stderr if line.startswith("http://"))
        until(lambda: answers(url) or process.poll() is not None, 90)
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
        talk = {"model": "mine", "messages": [{"role": "user", "content": "Warm?"}], "max_tokens": 60}
        found = client.chat.completions.create(**talk, tools=[TOOL], tool_choice="required")  # type: ignore[call-overload]
        (call,) = found.choices[0].message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments)["unit"] in ("C", "F")
        assert found.choices[0].finish_reason == "tool_calls"
        body = {"messages": talk["messages"], "chat_template_kwargs": {"mood": "glad"}}
        tokens = httpx.post(f"{url}/tokenize", json=body, trust_env=False, verify=False).json()["tokens"]
        assert (
            bytes(tokens[:-1]).decode() == "<|im_start|>user\nWarm?<|im_end|>\n<|im_start|>assistant\nglad"
            and tokens[-1] == 256
        )
        info = httpx.get(f"{url}/tokenizer_info", trust_env=False, verify=False).json()
        assert info["chat_template"] == template.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.communicate()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False
