"""Requests that two servers might read differently, as bytes: what one takes for a body is a request to the next.

After RFC 9112 and the published families (CL.TE, TE.CL, TE.TE, CL.0, chunk extensions, bare line feeds, obs-fold). Each
ends with a request for SMUGGLED, which must never be answered.
"""

from __future__ import annotations

import socket

SMUGGLED = b"GET /health?smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "messages": []}'
HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
WHOLE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)

# What follows the head's first lines.
AMBIGUOUS: dict[str, bytes] = {
    "CL and TE": b"content-length: %d\r\n" % len(WHOLE) + CHUNKED + b"\r\n" + WHOLE,
    "TE and CL": CHUNKED + b"content-length: 4\r\n\r\n" + WHOLE,
    "two lengths": b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "two lengths in one line": b"content-length: 0, %d\r\n\r\n" % len(BODY) + BODY,
    "length with a sign": b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "negative length": b"content-length: -1\r\n\r\n" + BODY,
    "hexadecimal length": b"content-length: 0x%x\r\n\r\n" % len(BODY) + BODY,
    "length with an underscore": b"content-length: 1_0\r\n\r\n" + BODY,
    "length with letters": b"content-length: %dx\r\n\r\n" % len(BODY) + BODY,
    "length in other digits": "content-length: \u0661\r\n\r\n".encode() + BODY,
    "empty length": b"content-length:\r\n\r\n" + BODY,
    "length beyond 64 bits": b"content-length: %d\r\n\r\n" % 2**65 + BODY,
    "length with a blank before the colon": b"content-length : %d\r\n\r\n" % len(BODY) + BODY,
    "TE that is nearly chunked": b"transfer-encoding: xchunked\r\n\r\n" + WHOLE,
    "TE identity": b"transfer-encoding: identity\r\n\r\n" + BODY,
    "TE not last chunked": b"transfer-encoding: chunked, identity\r\n\r\n" + WHOLE,
    "TE twice": CHUNKED + b"transfer-encoding: identity\r\n\r\n" + WHOLE,
    "TE chunked twice": CHUNKED * 2 + b"\r\n" + WHOLE,
    "TE with a control character": b"transfer-encoding: \x0bchunked\r\n\r\n" + WHOLE,
    "TE with a blank before the colon": b"transfer-encoding : chunked\r\n\r\n" + WHOLE,
    "TE folded": b"transfer-encoding:\r\n chunked\r\n\r\n" + WHOLE,
    "TE after a bare CR": b"x: y\rtransfer-encoding: chunked\r\n\r\n" + WHOLE,
    "TE after a zero byte": b"x: y\x00\r\n" + CHUNKED + b"\r\n" + WHOLE,
    "folded header": b"x: y\r\n z: 1\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "header without a name": b": y\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "header without a colon": b"xy\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "header that begins with a blank": b" x: y\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "name with a no-break space": b"content-length\xa0: 5\r\n\r\n" + BODY,
    "two hosts": b"host: y\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "two keys": b"authorization: Bearer a\r\nauthorization: Bearer b\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "chunk size 0x": CHUNKED + b"\r\n0x%b" % WHOLE,
    "chunk size with a sign": CHUNKED + b"\r\n+%b" % WHOLE,
    "negative chunk": CHUNKED + b"\r\n-1\r\n" + BODY,
    "chunk size beyond 64 bits": CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n" + BODY,
    "chunk longer than its size": CHUNKED + b"\r\n1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk without its line end": CHUNKED + b"\r\n%x\r\n%b0\r\n\r\n" % (len(BODY), BODY),
    "chunk extension with a line feed": CHUNKED + b"\r\n%x;a\nb\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "chunk extension with a bare CR": CHUNKED + b"\r\n%x;a\rb\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "chunk size that ends in a line feed": CHUNKED + b"\r\n%x\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
}
# First lines that are wrong, of a whole request.
LINES: dict[str, bytes] = {
    "version twice": b"GET /health HTTP/1.1 HTTP/1.1",
    "two blanks": b"GET  /health HTTP/1.1",
    "a tab": b"GET\t/health HTTP/1.1",
    "no version": b"GET /health",
    "HTTP/2.0": b"GET /health HTTP/2.0",
    "HTTP/1.10": b"GET /health HTTP/1.10",
    "lower-case version": b"GET /health http/1.1",
    "a control character in the path": b"GET /hea\x01lth HTTP/1.1",
    "a zero byte in the path": b"GET /health\x00 HTTP/1.1",
    "a blank in the path": b"GET /health x HTTP/1.1",
    "a method with a blank": b" GET /health HTTP/1.1",
}
# What is unusual, and has one meaning alone.
CLEAR: dict[str, bytes] = {
    "chunk extensions": CHUNKED + b"\r\n%x;name=value\r\n%b\r\n0;last\r\n\r\n" % (len(BODY), BODY),
    "trailers": CHUNKED + b"\r\n" + WHOLE[:-2] + b"x-late: 9\r\nauthorization: Bearer x\r\n\r\n",
    "chunks in capital letters": b"Transfer-Encoding: Chunked\r\n\r\n%X\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "one chunk for each byte": CHUNKED + b"\r\n" + b"".join(b"1\r\n%c\r\n" % one for one in BODY) + b"0\r\n\r\n",
    "blanks around the length": b"content-length:  %d \r\n\r\n" % len(BODY) + BODY,
}


def exchange(port: int, sent: bytes, seconds: float = 5.0) -> bytes:
    """All that comes back until the connection is closed, by the server or after `seconds`."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), seconds) as one:
        try:
            one.sendall(sent)
            one.shutdown(socket.SHUT_WR)
            while part := one.recv(65536):
                found += part
        except (ConnectionError, TimeoutError):
            pass
    return found


def statuses(found: bytes) -> list[int]:
    """Of all answers, one behind the other."""
    return [int(part[:3]) for part in found.split(b"HTTP/1.1 ")[1:]]
