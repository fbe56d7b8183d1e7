"""The page before `lmworks serve` itself, with a model that was trained for it: prepare, train, serve, talk.

SCREENSHOTS=docs/images make test-browser    # writes the pictures of the docs anew
"""

import itertools
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytestmark = pytest.mark.browser

ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}
TALK = {
    "What is a KV cache?": "It keeps the keys and values of all tokens so far, so that each new token costs one short"
    " step instead of the whole text again.",
    "And a prefix cache?": "It lets requests that begin alike share those keys and values: the second one skips what"
    " the first one has computed.",
    "Write a haiku.": "Tokens fall like rain,\none by one, the stream goes on.\nStop: the page is still.",
}
SPEC = """
name = "talk"
[model]
layers = 2
hidden = 96
heads = 4
vocab = 400
context = 256
tie_embeddings = true
init_std = 0.1
[data]
path = "data"
seq = 128
micro_batch = 8
[optim]
steps = 120
lr = 8e-3
"""
# A click in the page itself: an idle machine writes the whole answer before one from outside arrives.
STOP_EARLY = """() => {
  const [text, stop] = ["text", "stop"].map(id => document.getElementById(id));
  const look = () => text.value.length > 60 && !stop.disabled ? stop.click() : setTimeout(look, 1);
  look();
}"""
CONFIG = """
[[keys]]
name = "browser"
secret = "sk-browser"
"""


def lmworks(*words, folder):
    subprocess.run([sys.executable, "-m", "lmworks", *words], cwd=folder, env=ALONE, check=True, timeout=300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that knows three answers by heart, in any order."""
    folder = tmp_path_factory.mktemp("talk")
    said = [f"User: {question}\nAssistant: {answer}\n" for question, answer in TALK.items()]
    orders = [order for length in (1, 2, 3) for order in itertools.permutations(said, length)]
    (folder / "talk.jsonl").write_text("\n".join(json.dumps({"text": "".join(order) + "User:"}) for order in orders))
    (folder / "talk.toml").write_text(SPEC)
    prepare = ("data", "prepare", "talk.jsonl", "--tokenizer", "bpe:400", "--out", "data", "--val-fraction", "0.07")
    lmworks(*prepare, "--workers", "1", folder=folder)
    lmworks("train", "talk.toml", "--run-dir", "run", folder=folder)
    return folder


@pytest.fixture(scope="module")
def url(trained):
    """Two models (the same weights under two names), with a key."""
    (trained / "serve.toml").write_text(CONFIG)
    words = ("serve", "talk=run", "other=run", "--port", "0", "--config", "serve.toml", "engine.max_seqs=8")
    command = [sys.executable, "-m", "lmworks", *words]
    with (trained / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=trained, env=ALONE, stderr=log)
    try:
        yield ready(process, trained / "log")
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def ready(process, log):
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        try:
            if found:
                urllib.request.urlopen(f"{found[0]}/ready", timeout=5).close()
                return found[0]
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture
def visit(chromium, url):
    wrong, contexts = [], []

    def open_page(**screen):
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **screen})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "Content Security" in said.text else None)
        page.on("request", lambda one: None if one.url.startswith((url, "data:")) else wrong.append(one.url))
        page.goto(f"{url}/")
        until(page, "!document.getElementById('alert').hidden")  # it has been told that it needs a key
        assert "wants an API key" in page.inner_text("#alert")
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("sk-browser")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('model').options.length === 2")
        page.fill("#temperature", "0")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def until(page, expression, seconds=30):
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def say(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    until(page, "!document.getElementById('send').disabled")


def answers(page):
    return [text.strip() for text in page.locator("article.assistant .words").all_text_contents()]


def picture(page, name, tmp_path):
    page.screenshot(path=Path(os.environ.get("SCREENSHOTS", tmp_path)) / f"serve-page-{name}.png")


def test_a_talk_with_two_models(visit, url, tmp_path):
    page = visit()
    first, second, third = TALK
    say(page, first)
    page.select_option("#model", "other")
    say(page, second)
    assert answers(page) == [TALK[first], TALK[second]]
    assert page.locator("article.assistant header").all_inner_texts() == ["talk", "other"]
    assert re.fullmatch(r"[\d.]+ tokens/s · \d+ tokens · first after \d+ ms", page.inner_text("#figures"))
    page.select_option("#model", "talk")
    words = f"bench serve --url {url} --model talk --concurrency 4 --requests 150 --input 40:90 --output 60:120 --json"
    extra = ["--shared-prefix", "48"]
    command = [sys.executable, "-m", "lmworks", *words.split(), *extra]
    with subprocess.Popen(command, env={**ALONE, "LMWORKS_API_KEY": "sk-browser"}, stdout=subprocess.PIPE) as load:
        until(page, "Number(document.getElementById('running').textContent) >= 2")
        until(page, "parseFloat(document.getElementById('hits').textContent) > 5")
        say(page, third)
        page.wait_for_timeout(4000)
        picture(page, "light", tmp_path)
        assert float(page.inner_text("#kv").rstrip("%")) > 0 and int(page.inner_text("#speed")) > 0
        page.click("#theme")
        picture(page, "dark", tmp_path)
        found = json.load(load.stdout)
    assert found["completed"] == 150 and found["cached_tokens"] > 0
    assert answers(page)[2] == TALK[third]
    until(page, "document.getElementById('running').textContent === '0'")


def test_stop_reaches_the_engine(visit, tmp_path):
    page = visit(viewport={"width": 390, "height": 780}, is_mobile=True, has_touch=True, device_scale_factor=2)
    page.click("#tab-completion")
    page.fill("#text", "User: Write a haiku.\nAssistant:")
    page.fill("#max_tokens", "200")
    page.evaluate(STOP_EARLY)
    page.click("#send")
    until(page, "document.getElementById('text').value.length > 60 && !document.getElementById('send').disabled")
    picture(page, "phone", tmp_path)
    shown = page.input_value("#text")
    assert shown.startswith("User: Write a haiku.\nAssistant: Tokens fall")
    until(page, "document.getElementById('running').textContent === '0'")
    assert page.input_value("#text") == shown and "200 tokens" not in page.inner_text("#figures")


def test_what_the_server_refuses_is_told(visit):
    page = visit()
    page.fill("#max_tokens", "100000")
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    until(page, "!document.getElementById('alert').hidden")
    assert "max_tokens" in page.inner_text("#alert") and page.input_value("#prompt") == "hello"
