"""Personal data and secrets: found by form and context, replaced by typed placeholders (as for StarCoder)."""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..spec.schema import opt
from .documents import KEPT, Decide, Document, DocumentStage


class Span(NamedTuple):
    start: int
    stop: int
    kind: str


Finder = Callable[[str], Iterator[Span]]

PLACEHOLDERS = {"email": "<EMAIL>", "ip": "<IP_ADDRESS>", "password": "<PASSWORD>"}
KEY = "<KEY>"  # of every other kind


def replace(text: str, spans: list[Span]) -> tuple[str, Counter[str]]:
    """Where two overlap, the one that begins first stands."""
    pieces, at = [], 0
    counts: Counter[str] = Counter()
    for span in sorted(spans):
        if span.start >= at:
            pieces += [text[at : span.start], PLACEHOLDERS.get(span.kind, KEY)]
            at = span.stop
            counts[span.kind] += 1
    return "".join([*pieces, text[at:]]), counts


# --- personal data ----------------------------------------------------------------------------------------

DOMAIN = re.compile(r"@((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+([A-Za-z]{2,24}))(?![\w-])")
LOCAL = re.compile(r"[A-Za-z0-9](?:[\w.+%'-]{0,62}[\w+%-])?\Z")
NAMED_DOMAINS = re.compile(  # the generic ones with more than a few addresses; two letters are a country's
    "com|org|net|edu|gov|mil|int|info|biz|name|pro|dev|app|tech|cloud|online|site|xyz|email|mobi|museum|[a-z]{2}"
)
RESERVED = re.compile(r"(?i)(?:^|\.)(?:example\.(?:com|net|org|edu)|\w*(?:example|test|invalid|localhost|local))\Z")


def emails(text: str) -> Iterator[Span]:
    """Found from the @, so that the search is linear. Names that RFC 2606 reserves for examples are left."""
    if "@" not in text:
        return
    for match in DOMAIN.finditer(text):
        if not NAMED_DOMAINS.fullmatch(match[2].lower()) or RESERVED.search(match[1]):
            continue
        local = LOCAL.search(text[max(0, match.start() - 64) : match.start()])
        if local is None or (len(local[0]) > 16 and not any(char.isalpha() for char in local[0])):
            continue  # a message id
        if not (local[0] == "git" and text[match.end() : match.end() + 1] in (":", "/")):
            yield Span(match.start() - len(local[0]), match.end(), "email")


# lookbehinds come after the first character, so that the search is for that one
IPV4 = re.compile(r"[1-9](?<![\w.-].)\d{0,2}(?:\.\d{1,3}){3}(?!\.?\w|-\d)")
IPV6 = re.compile(r"[23](?<![\w:.].)[0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])")
NUMBERED = re.compile(
    r"(?i)(?:\bv|versions?|ver|release|rev|section|sect|chapter|§|oid|rfc|appendix)[\s\w.:=\"'(-]{0,12}\Z"
)


def addresses(text: str) -> Iterator[Span]:
    """Public ones: a private, local, reserved or documentation address says nothing about a person."""
    for match in IPV4.finditer(text):
        if (
            public(match[0])
            and not number_like(match[0])
            and not NUMBERED.search(text[max(0, match.start() - 24) : match.start()])
        ):
            yield Span(*match.span(), "ip")
    for match in IPV6.finditer(text):
        if public(match[0]):
            yield Span(*match.span(), "ip")


def number_like(text: str) -> bool:
    """4.2.11.2 and 8.2.4.45 are sections, versions or object identifiers far more often than addresses."""
    octets = [int(octet) for octet in text.split(".")]
    return max(octets) < 25 or max(octets[:3]) < 10


def public(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.is_global and not address.is_multicast


# --- secrets ----------------------------------------------------------------------------------------------

TOKENS = {  # kind → (substrings of which one must be there, the form)
    "aws_key": ("AKIA ASIA ABIA ACCA", r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b"),
    "github_token": (
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        r"\b(?:gh[pousr]_[A-Za-z0-9]{36,251}|github_pat_[A-Za-z0-9_]{82})\b",
    ),
    "gitlab_token": ("glpat-", r"\bglpat-[\w-]{20,}"),
    "slack_token": ("xox", r"\bxox[abeprs]-(?:\d+-)*[A-Za-z0-9-]{10,}"),
    "google_key": ("AIza", r"\bAIza[\w-]{35}(?![\w-])"),
    "stripe_key": ("k_live_", r"\b[rs]k_live_[A-Za-z0-9]{20,}\b"),
    "npm_token": ("npm_", r"\bnpm_[A-Za-z0-9]{36}\b"),
    "pypi_token": ("pypi-", r"\bpypi-AgE[\w-]{50,}"),
    "huggingface_token": ("hf_", r"\bhf_[A-Za-z0-9]{34}\b"),
    "openai_key": ("sk-", r"\bsk-(?:(?:proj|svcacct|ant-[a-z0-9]+)-[\w-]{32,}|[A-Za-z0-9]{32,}(?![\w-]))"),
    "jwt": ("eyJ", r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
    "private_key": (
        "-----BEGIN",
        r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY(?: BLOCK)?-----[^<>{}]{64,20000}?"
        r"-----END [A-Z ]{0,20}PRIVATE KEY(?: BLOCK)?-----",
    ),
}
FORMS = {kind: (needles.split(), re.compile(form)) for kind, (needles, form) in TOKENS.items()}

URL_PASSWORD = re.compile(r"\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@'\"<>{}$%]{1,64}:([^\s/:@'\"<>{}$%*]{3,128})@[\w.-]")
ASSIGNED = re.compile(r"[:=,][=>]?[ \t]{0,4}[\"']([^\s\"'<>{}$%]{8,200})[\"']")
NAME = re.compile(
    r"(?i)(passw(?:or)?d|passphrase|pwd|secret|token|(?:api|access|auth|private|signing|encryption)_?key|credentials?)"
    r"[\w.-]{0,20}[\"'\])]{0,2}\s{0,4}\Z"
)
PASSWORDS = ("password", "passwd", "passphrase", "pwd")
DULL = re.compile(
    r"(?i)example|sample|dummy|fake|test|changeme|placeholder|your|xxxx|\*\*\*|\.\.\.|password|secret|token|1234|abcd"
)
HEX = re.compile(r"[0-9a-fA-F]+\Z")


def tokens(text: str) -> Iterator[Span]:
    for kind, (needles, form) in FORMS.items():
        if any(needle in text for needle in needles):
            for match in form.finditer(text):
                if kind == "private_key" or (entropy(match[0]) >= 3 and not DULL.search(match[0])):
                    yield Span(*match.span(), kind)


def assigned(text: str) -> Iterator[Span]:
    """A string that looks random, given to a name that says it is secret; passwords in URLs."""
    for match in ASSIGNED.finditer(text):
        if not password_like(match[1]) or DULL.search(match[1]):
            continue
        name = NAME.search(text[max(0, match.start() - 64) : match.start()])
        if name and name[1].lower() in PASSWORDS:
            yield Span(*match.span(1), "password")
        elif name and secret_like(match[1]):
            yield Span(*match.span(1), "secret")
    if "://" in text:
        for match in URL_PASSWORD.finditer(text):
            if not DULL.search(match[1]) and match[1].lower() not in ("pass", "pwd", "pw", "passwd"):
                yield Span(*match.span(1), "password")


def entropy(text: str) -> float:
    """Bits a character, by the counts in the text itself."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())


def secret_like(text: str) -> bool:
    """16 characters or more, digits among letters, more different ones than names and paths have (detect-secrets)."""
    mixed = any(char.isdigit() for char in text) and any(char.isalpha() for char in text)
    if len(text) < 16 or not mixed or "/" in text[:2] or "(" in text:
        return False
    return entropy(text) >= (3.0 if HEX.match(text) else 3.6)


def password_like(text: str) -> bool:
    """Shorter ones count, with three of: lower case, upper case, digits, signs."""
    kinds = (str.islower, str.isupper, str.isdigit, lambda char: not char.isalnum())
    classes = sum(any(kind(char) for char in text) for kind in kinds)
    return secret_like(text) or (classes >= 3 and entropy(text) >= 2.75 and "(" not in text)


# --- stages -----------------------------------------------------------------------------------------------

ACTIONS = ("replace", "drop")


def act(finders: tuple[Finder, ...], action: str, reason: str) -> Decide:
    def decide(document: Document) -> str:
        spans = [span for find in finders for span in find(document.text)]
        if not spans:
            return KEPT
        text, counts = replace(document.text, spans)
        if action == "drop":
            return reason
        document.text = text
        for kind, count in counts.items():
            document.note(kind, count)
        return KEPT

    return decide


@dataclass(frozen=True)
class Personal(DocumentStage):
    section: ClassVar[str] = "stages.pii"
    name: ClassVar[str] = "pii"
    about: ClassVar[str] = "replaces e-mail addresses and public IP addresses by <EMAIL> and <IP_ADDRESS>"
    source: ClassVar[str] = "StarCoder (Li et al. 2023), section 4.3"

    action: str = opt("replace", "replace what is found, or drop the document", choices=ACTIONS)

    def open(self) -> Decide:
        return act((emails, addresses), self.action, "personal_data")


@dataclass(frozen=True)
class Secrets(DocumentStage):
    section: ClassVar[str] = "stages.secrets"
    name: ClassVar[str] = "secrets"
    about: ClassVar[str] = "replaces keys, tokens and passwords by <KEY> and <PASSWORD>"
    source: ClassVar[str] = "StarCoder (Li et al. 2023), section 4.3; forms as the services publish them"

    action: str = opt("replace", "replace what is found, or drop the document", choices=ACTIONS)

    def open(self) -> Decide:
        return act((tokens, assigned), self.action, "secrets")


STAGES = (Personal, Secrets)
