"""Personal data and secrets: what is planted among real source is found and replaced, and nothing else."""

from __future__ import annotations

import argparse
import random
import string
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lmworks.curate.documents import Document
from lmworks.curate.pii import Personal, Secrets, Span, addresses, assigned, emails, replace, tokens

ALNUM = string.ascii_letters + string.digits
Draw = random.Random


def chars(draw: Draw, count: int, among: str = ALNUM) -> str:
    return "".join(draw.choices(among, k=count))


def word(draw: Draw) -> str:
    return chars(draw, draw.randint(3, 9), string.ascii_lowercase)


def pem(draw: Draw) -> str:
    kind = draw.choice(["", "RSA ", "EC ", "OPENSSH "])
    body = "\n".join(textwrap.wrap(chars(draw, 400, ALNUM + "+/"), 64))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


PLANTED: dict[str, tuple[Callable[[Draw], str], str]] = {  # kind → (a value, the line that it stands in)
    "email": (
        lambda d: (
            f"{word(d)}{d.choice(['.', '_', '+', '-'])}{word(d)}@{word(d)}.{d.choice(['com', 'org', 'de', 'ac.uk'])}"
        ),
        "# written by someone <@>, last year",
    ),
    "ip": (
        lambda d: d.choice(
            [
                f"{d.randint(70, 95)}.{d.randint(0, 255)}.{d.randint(0, 255)}.{d.randint(1, 254)}",
                f"2a02:{chars(d, 4, 'abcdef123')}:{chars(d, 4, 'abcdef123')}::{d.randint(1, 99)}",
            ]
        ),
        'connect("@", 80)',
    ),
    "aws_key": (lambda d: "AKIA" + chars(d, 16, string.ascii_uppercase + string.digits), "export AWS_ACCESS_KEY_ID=@"),
    "github_token": (lambda d: "ghp_" + chars(d, 36), "git clone https://@@github.com/a/b"),
    "gitlab_token": (lambda d: "glpat-" + chars(d, 20), "PRIVATE-TOKEN: @"),
    "slack_token": (lambda d: f"xoxb-{d.randint(10**11, 10**12)}-{chars(d, 24)}", "client = Client('@')"),
    "google_key": (lambda d: "AIza" + chars(d, 35), "?key=@&v=3"),
    "stripe_key": (lambda d: "sk_live_" + chars(d, 24), "stripe.api = @;"),
    "npm_token": (lambda d: "npm_" + chars(d, 36), "//registry/:_authToken=@"),
    "pypi_token": (lambda d: "pypi-AgEIcHlwaS5vcmc" + chars(d, 80), "twine upload -p @"),
    "huggingface_token": (lambda d: "hf_" + chars(d, 34), "login(@)"),
    "openai_key": (lambda d: "sk-proj-" + chars(d, 48), "OPENAI=@"),
    "jwt": (lambda d: f"eyJ{chars(d, 30)}.eyJ{chars(d, 60)}.{chars(d, 43)}", "Authorization: Bearer @"),
    "private_key": (pem, "@"),
    "secret": (lambda d: chars(d, d.randint(24, 40)) + "7", 'client_secret = "@"'),
    "password": (lambda d: chars(d, 10) + d.choice("!#&?") + "aB7", "'db_password': '@',"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_values_are_found(kind: str) -> None:
    """Recall and precision of 60 values among the lines of a real module: all of them, and nothing beside them."""
    draw = random.Random(kind)
    lines = Path(random.__file__).read_text().splitlines()
    value, line = PLANTED[kind]
    values = [value(draw) for _ in range(60)]
    expected = list(lines)
    for one in values:
        at = draw.randrange(len(lines))
        before, _, after = line.partition("@")
        lines.insert(at, before + one + after)
        placeholder = {"email": "<EMAIL>", "ip": "<IP_ADDRESS>", "password": "<PASSWORD>"}.get(kind, "<KEY>")
        expected.insert(at, before + placeholder + after)
    document = Document("a", "\n".join(lines))
    stage = Personal() if kind in ("email", "ip") else Secrets()
    assert stage.open()(document) == ""
    assert document.text == "\n".join(expected)
    assert document.notes == {kind: 60}


INNOCENT = [
    "user@example.com, root@localhost, a@b.test, git@github.com:owner/name.git, x@y, weights@hidden.T, @decorator",
    "pip install package@1.2.3; name@sha256:0123456789abcdef",
    "127.0.0.1 192.168.1.1 10.1.2.3 0.0.0.0 255.255.255.255 224.0.0.1 203.0.113.7 version 52.1.77.3 v80.44.2.91",
    "1.2.3.4 2.5.4.10 4.2.11.2 8.2.4.45 192.168.300.1 90.1.2.3.4 std::vector a::b 12:30:45 2001:db8::1 fe80::1",
    'password = "hunter22"; password = getpass("Password: "); PASSWORD: "${DB_PASSWORD}"; pwd = "your-Passw0rd-here"',
    'api_key = os.environ["OPENAI_API_KEY"]; token = "identifier_of_a_thing"; secret = "/run/secrets/database/main"',
    'key = "0123456789abcdef0123456789abcdef"; sha = "d41d8cd98f00b204e9800998ecf8427e"',
    "AKIAIOSFODNN7EXAMPLE sk-learn-compatible-estimators-of-some-kind ghp_short xoxb hf_hub_download",
    "-----BEGIN PRIVATE KEY-----\n(your key here)\n-----END PRIVATE KEY-----",
    "-----BEGIN CERTIFICATE-----\nMIIB0zCCAX2gAwIBAgIJAI/M7BYjwB+uMA0GCSqGSIb3DQE\n-----END CERTIFICATE-----",
    "https://user:password@host/ postgres://user:pass@localhost/db http://host:80/@path",
]


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_looks_alike_is_left(text: str) -> None:
    assert [text[s.start : s.stop] for find in (emails, addresses, tokens, assigned) for s in find(text)] == []


def test_addresses_of_authors_in_the_standard_library() -> None:
    found = Counter(argparse_text[s.start : s.stop] for s in emails(argparse_text))
    assert sum(found.values()) == argparse_text.count("@gmail.com")


argparse_text = Path(argparse.__file__).read_text()


def test_overlapping_spans_are_replaced_once() -> None:
    text, counts = replace("a secret here", [Span(4, 8, "secret"), Span(2, 8, "jwt"), Span(9, 13, "email")])
    assert text == "a <KEY> <EMAIL>"
    assert counts == {"jwt": 1, "email": 1}


def test_documents_can_be_dropped_instead() -> None:
    document = Document("a", "mail me: jane.doe@lmworks.dev")
    assert Personal(action="drop").open()(document) == "personal_data"
    assert document.text == "mail me: jane.doe@lmworks.dev"
