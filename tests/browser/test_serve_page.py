"""The page at `/` in a real browser, before a server whose every word is known."""

import asyncio
import subprocess
import time

import pytest

from fake_server import FakeServer, models
from lmworks.serve.app import page as serve_page

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
EVIL = "<img src=x onerror=alert(1)>"
METRICS = """# HELP vllm:num_requests_running Answers that are computed.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="small"} 3.0
vllm:num_requests_running{model_name="large \\"one\\""} 11.0
vllm:num_requests_waiting{model_name="small"} 2.0
vllm:kv_cache_usage_perc{model_name="small"} 0.425
vllm:prefix_cache_queries_total{model_name="small"} 200.0
vllm:prefix_cache_hits_total{model_name="small"} 50.0
vllm:num_preemptions_total{model_name="small"} 4.0
vllm:generation_tokens_total{model_name="small"} 1000.0
"""


async def answer(talk):
    """Says after whoever asks, word by word, or does as the message wants it."""
    wish = talk.body["messages"][-1]["content"] if "messages" in talk.body else talk.body["prompt"]
    if wish == "refuse":
        error = {"error": {"message": "the house is full", "type": "x", "param": None, "code": "queue_full"}}
        await talk.document("429 Too Many Requests", error, "retry-after: 3\r\n")
        return
    say = talk.delta if "messages" in talk.body else talk.token
    await talk.head()
    if "messages" in talk.body:
        await talk.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    words = [f"{word} " for word in wish.split(" ")] if wish != "for ever" else ["again "] * 10_000
    for word in words:
        await say(word)
        await asyncio.sleep(0.02)
    if wish == "fail":
        await talk.event({"error": {"message": "the engine stopped"}})
        await talk.event(b"[DONE]")
        await talk.chunk(b"")
        return
    await say("", "stop")
    await talk.end(len(words))


@pytest.fixture(scope="module")
def server():
    with FakeServer(answer) as server:
        served = serve_page()
        server.pages |= {
            "/": (dict(served.headers), served.html),
            "/v1/models": ({"content-type": "application/json"}, models("small", 'large "one"', EVIL, context=100)),
            "/health": ({}, b"{}"),
            "/metrics": ({"content-type": "text/plain"}, METRICS.encode()),
        }
        yield server


@pytest.fixture
def visit(chromium, server):
    """Opens the page. When the test ends: nothing came from elsewhere, nothing went wrong."""
    wrong, contexts = [], []

    def open_page(**screen):
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 860}, **screen})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda one: None if one.url.startswith((server.url, "data:")) else wrong.append(one.url))
        page.goto(f"{server.url}/")
        until(page, "document.getElementById('model').options.length > 0")
        return page

    open_page.wrong = wrong
    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def page(visit):
    return visit()


def until(page, expression, seconds=10):
    """Playwright's own way of waiting evaluates strings, which this page forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def say(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def over(page):
    until(page, "!document.getElementById('send').disabled")


def said(page):
    return [text.strip() for text in page.locator("#log article p").all_text_contents()]


def as_curl(page):
    page.click("#as-curl summary")
    until(page, "document.getElementById('curl').textContent")
    return page.inner_text("#curl")


def test_a_chat(page, server):
    page.fill("#system", "Be brief.")
    say(page, "one two three")
    over(page)
    say(page, "four")
    over(page)
    assert said(page) == ["one two three", "one two three", "four", "four"]
    assert page.locator("#log article header").nth(1).inner_text() == "small"
    assert "tokens/s" not in page.inner_text("#figures") and "1 token · first after" in page.inner_text("#figures")
    sent = server.talks[-1].body
    assert [one["role"] for one in sent["messages"]] == ["system", "user", "assistant", "user"]
    assert sent["messages"][0]["content"] == "Be brief." and sent["messages"][2]["content"] == "one two three "
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0.7, 1, 50) and "seed" not in sent
    assert page.input_value("#prompt") == ""


def test_words_appear_while_they_come(page):
    say(page, "for ever")
    until(page, "document.querySelector('article.assistant p')?.textContent.length > 20")
    early = page.locator("article.assistant p").inner_text()
    until(page, f"document.querySelector('article.assistant p').textContent.length > {len(early) + 20}")
    assert page.is_disabled("#send") and page.get_attribute("#log", "aria-busy") == "true"
    assert "tokens/s" in page.inner_text("#figures")
    page.click("#stop")
    over(page)


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop(page, server, how):
    say(page, "for ever")
    until(page, "document.querySelector('article.assistant p')?.textContent.length > 20")
    writer = server.talks[-1].writer
    page.click("#stop") if how == "button" else page.keyboard.press("Escape")
    over(page)
    shown = said(page)[1]
    assert shown.startswith("again again") and "stopped" in page.inner_text("article.assistant header")
    page.wait_for_timeout(300)
    assert said(page)[1] == shown
    assert writer.is_closing() or writer.transport.is_closing()  # the server knows that nobody reads any more
    say(page, "more")
    over(page)
    assert server.talks[-1].body["messages"][1]["content"].strip() == shown  # what was said stays said


def test_another_model(page, server):
    page.fill("#max_tokens", "70")
    page.select_option("#model", 'large "one"')
    until(page, "document.getElementById('running').textContent === '11'")
    assert page.inner_text("#waiting") == "–"
    say(page, "hello")
    over(page)
    assert server.talks[-1].body["model"] == 'large "one"' and server.talks[-1].body["max_tokens"] == 70
    assert page.locator("#log article header").nth(1).inner_text() == 'large "one"'


def test_a_completion_and_back(page, server):
    page.click("#tab-completion")
    assert page.is_hidden("#system") and page.is_hidden("#log")
    page.fill("#text", "once upon a time")
    page.press("#text", "Control+Enter")
    over(page)
    assert page.input_value("#text").strip() == "once upon a timeonce upon a time"
    assert server.talks[-1].path == "/v1/completions" and server.talks[-1].body["prompt"] == "once upon a time"
    page.click("#undo")
    assert page.input_value("#text") == "once upon a time" and page.is_disabled("#undo")


def test_an_exchange_is_taken_back(page, server):
    for text in ("first", "second"):
        say(page, text)
        over(page)
    page.click("#undo")
    assert said(page) == ["first", "first"] and page.input_value("#prompt") == "second"
    page.press("#prompt", "Enter")
    over(page)
    assert [one["content"].strip() for one in server.talks[-1].body["messages"]] == ["first", "first", "second"]


def test_the_engine_s_figures(page, server):
    until(page, "document.getElementById('running').textContent === '3'")
    shown = {name: page.inner_text(f"#{name}") for name in ("waiting", "preempted", "kv", "hits")}
    assert shown == {"waiting": "2", "preempted": "4", "kv": "42.5%", "hits": "25.0%"}
    assert page.locator("#kv-bar").evaluate("bar => bar.value") == pytest.approx(0.425)
    assert page.inner_text("#health") == "healthy"
    before = server.pages["/metrics"]
    try:
        server.pages["/metrics"] = (before[0], METRICS.replace("1000.0", "1500.0").encode())
        until(page, "Number(document.getElementById('speed').textContent) > 100")
    finally:
        server.pages["/metrics"] = before
    assert page.locator("#history polyline").get_attribute("points")


def test_a_refusal_is_told_and_loses_nothing(visit):
    page = visit()
    say(page, "refuse")
    over(page)
    assert page.inner_text("#alert") == "the house is full (retry after 3 s)"
    assert said(page) == [] and page.input_value("#prompt") == "refuse"
    say(page, "hello")
    over(page)
    assert page.is_hidden("#alert") and said(page) == ["hello", "hello"]
    assert [text for text in visit.wrong if "429" not in text] == []
    visit.wrong.clear()  # chromium's own note of the 429


def test_a_stream_that_fails_half_way(page):
    say(page, "fail")
    over(page)
    assert page.inner_text("#alert") == "the engine stopped"
    assert said(page) == ["fail", "fail"] and "broke off" in page.inner_text("article.assistant header")


def test_the_key_goes_into_the_header_and_nowhere_else(page, server):
    page.fill("#key", "sk-secret")
    page.press("#key", "Tab")
    say(page, "hello")
    over(page)
    assert server.talks[-1].headers["authorization"] == "Bearer sk-secret"
    shown = as_curl(page)
    assert "LMWORKS_API_KEY" in shown and "secret" not in shown
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert "secret" not in kept
    page.reload()
    assert page.input_value("#key") == ""


def test_curl_sends_the_same(page, server):
    page.fill("#prompt", 'it\'s "so" $HOME `x` é\nnew')
    done = subprocess.run(["sh", "-c", f"{as_curl(page)} -s"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    typed = server.talks[-1].body
    page.press("#prompt", "Enter")
    over(page)
    assert typed["messages"] == server.talks[-1].body["messages"] and typed["model"] == "small"


def test_dark_and_light(visit):
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit(color_scheme=scheme) for scheme in ("light", "dark"))
    seen = light.evaluate(background), dark.evaluate(background)
    assert seen[0] != seen[1]
    light.click("#theme")
    assert light.evaluate(background) == seen[1] and light.get_attribute("#theme", "aria-pressed") == "true"
    light.reload()
    assert light.evaluate(background) == seen[1]  # remembered
    light.click("#theme")
    assert light.evaluate(background) == seen[0]


def test_names_and_answers_are_shown_and_not_run(page):
    page.select_option("#model", EVIL)
    say(page, EVIL)
    over(page)
    assert said(page)[1] == EVIL and page.locator("img").count() == 0


def test_a_foreign_script_does_not_run(visit):
    page = visit()
    page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "window.foreign = true";
      document.body.append(script);
    }""")
    assert page.evaluate("window.foreign") is None
    elsewhere = page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'not sent')")
    assert elsewhere == "not sent"
    assert visit.wrong and all("Content Security Policy" in text or "violates" in text for text in visit.wrong)
    visit.wrong.clear()


def test_the_keyboard_reaches_everything(page):
    page.focus("#model")
    reached = ["model"]
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    order = ["model", "key", "theme", "tab-chat", "clear", "log", "prompt", "send"]
    assert [name for name in reached if name in order] == order
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-completion" and page.is_visible("#text")
    page.keyboard.press("ArrowLeft")
    assert page.is_visible("#log")


def test_wrong_settings_are_told(page, server):
    count = len(server.talks)
    page.fill("#temperature", "-1")
    say(page, "hello")
    until(page, "!document.getElementById('alert').hidden")
    assert "temperature" in page.inner_text("#alert") and len(server.talks) == count
    assert page.input_value("#prompt") == "hello"


def test_on_a_phone_nothing_sticks_out(visit):
    page = visit(**PHONE)
    say(page, "a" * 200)
    over(page)
    as_curl(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_every_field_has_a_name(page):
    nameless = page.evaluate("""[...document.querySelectorAll("input, select, textarea, button, meter")]
      .filter(one => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim()))
      .map(one => one.id)""")
    assert nameless == []


def test_an_empty_conversation_says_what_to_do(page):
    assert "No messages yet" in page.inner_text("#empty")
    page.click("#empty button >> nth=0")
    assert page.input_value("#prompt") == "Explain the KV cache in three sentences."
    page.press("#prompt", "Enter")
    over(page)
    assert not page.is_visible("#empty")
    page.click("#clear")
    assert page.is_visible("#empty") and said(page) == []


MARKDOWN = """# Title
Some **bold** and *soft* and `x < 1` [here](https://example.org/a).

- one
- <b>two</b>

```python
def f():
    return "<img src=x onerror=alert(1)>"
```
> [no](javascript:alert(1))"""


def test_markdown_is_drawn_and_html_is_text(page):
    blocks = page.evaluate("text => markdown(text).map(one => one.outerHTML)", MARKDOWN)
    assert blocks == [
        "<h3>Title</h3>",
        "<p>Some <strong>bold</strong> and <em>soft</em> and <code>x &lt; 1</code> "
        '<a href="https://example.org/a" rel="noopener noreferrer nofollow" target="_blank" '
        'title="https://example.org/a">here</a>.</p>',
        "<ul><li>one</li><li>&lt;b&gt;two&lt;/b&gt;</li></ul>",
        '<pre><code>def f():\n    return "&lt;img src=x onerror=alert(1)&gt;"</code></pre>',
        "<blockquote><p>[no](javascript:alert(1))</p></blockquote>",
    ]
    # Half an answer: a fence without an end is code, a lone star is a star.
    assert page.evaluate("markdown('```\\na *').map(one => one.outerHTML)") == ["<pre><code>a *</code></pre>"]
    assert page.evaluate("markdown('2 * 3 * 4').map(one => one.outerHTML)") == ["<p>2 * 3 * 4</p>"]


def test_code_of_an_answer_is_monospace(page):
    say(page, "use `x=1` here")
    over(page)
    code = page.locator("article.assistant code")
    assert code.inner_text() == "x=1"
    assert "monospace" in code.evaluate("one => getComputedStyle(one).fontFamily")
