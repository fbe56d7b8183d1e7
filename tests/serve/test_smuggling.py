"""No request hides in another one's body, and nobody chooses a path around the keys."""

from __future__ import annotations

import pytest
from api_server import Api

from smuggling import AMBIGUOUS, CLEAR, HEAD, LINES, SMUGGLED, exchange, statuses

COMPLETIONS = HEAD % b"/v1/completions"


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_requests_are_refused_and_the_connection_ends(api: Api, name: str) -> None:
    found = statuses(exchange(api.port, COMPLETIONS + AMBIGUOUS[name] + SMUGGLED))
    assert len(found) == 1 and found[0] in (400, 413, 431, 501), found


@pytest.mark.parametrize("name", LINES)
def test_wrong_request_lines(api: Api, name: str) -> None:
    found = statuses(exchange(api.port, LINES[name] + b"\r\nhost: x\r\n\r\n" + SMUGGLED))
    assert len(found) == 1 and found[0] in (400, 404, 505), found


@pytest.mark.parametrize("name", CLEAR)
def test_unusual_requests_with_one_meaning_are_served(api: Api, name: str) -> None:
    """The next request on the connection is a request of its own."""
    found = exchange(api.port, COMPLETIONS + CLEAR[name] + SMUGGLED)
    # `messages` is no field of completions: the whole body was read
    assert statuses(found) == [400, 200] and b"messages" in found, found


def test_a_body_of_a_get_is_no_request(api: Api) -> None:
    """CL.0: a route that needs no body does not leave one on the connection."""
    head = b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(SMUGGLED)
    assert statuses(exchange(api.port, head + SMUGGLED)) == [200]
