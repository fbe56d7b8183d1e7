"""The page at `/` without a browser: what its headers allow is what is in it, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from api_server import Api

from lmworks.serve.app import page, read_asset


class Inside(HTMLParser):
    """Scripts and styles as a browser sees them, and all that would be loaded or run from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.found, self.foreign = "", dict[str, list[str]](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open = tag
        for name, value in attrs:
            outside = name in ("src", "href", "action") and not (value or "").startswith("data:")
            if outside or name == "style" or name.startswith("on"):
                self.foreign.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        if self.open in ("script", "style"):
            self.found.setdefault(self.open, []).append(data)

    def handle_endtag(self, tag: str) -> None:
        self.open = ""


def test_content_security_policy(api: Api) -> None:
    answer = api.http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    inside = Inside()
    inside.feed(answer.text)
    assert inside.foreign == []
    for tag in ("script", "style"):
        (text,) = inside.found[tag]
        expected = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{expected}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", answer.text)


def test_the_page_begins_with_an_empty_state_and_plain_labels() -> None:
    text = page().html.decode()
    assert '<div id="empty">' in text and "No messages yet" in text
    labels = re.findall(r"<(?:label|dt)[^>]*>([^<]+)<", text)
    assert {"Model", "API key", "Temperature", "Top-p", "Max tokens", "Seed", "System prompt"} <= set(labels)
    assert {"Requests running", "Requests waiting", "Output tokens/s", "Preemptions"} <= set(labels)


def test_answers_are_not_parsed_as_html() -> None:
    script = read_asset("page_markdown.js")
    assert "document.createElement" in script
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|DOMParser|ContextualFragment|Function\(", script)
    assert "https?:" in script  # no other address becomes a link
