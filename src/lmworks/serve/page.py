"""The page at `/`: a playground for the models, and the state of their engines.

One response holds all of it. Its content security policy allows this script and style alone, by digest, and requests to
this server alone.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Page:
    html: bytes
    headers: Mapping[str, str]


@cache
def page() -> Page:
    style, script = own("page.css"), own("page_engine.js") + own("page_markdown.js") + own("page.js")
    html = own("page.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Page(html.encode(), headers)


def own(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
