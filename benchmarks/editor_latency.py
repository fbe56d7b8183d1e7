"""Latency of `lmworks lsp` on large projects: a real LSP client asks, and a server of completions answers at once.

So what is timed is the editor's part: finding similar files, the prompt, the protocol. The cursor is in a file of the
project, a key is typed before every request, and between the rounds another file is saved with a change.

    python benchmarks/editor_latency.py --save                       # Python's standard library, installed packages
    PYTHONPATH=OTHER/src python benchmarks/editor_latency.py --name before --save    # another commit beside it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from common import RESULTS, write_result
from lsprotocol import types
from pygls.lsp.client import LanguageClient

PROJECTS = {"standard library": "stdlib", "installed packages": "purelib"}
RESULT = "editor_latency"
PAUSE_S = 20.0


class Answer(BaseHTTPRequestHandler):
    """One token for every prompt."""

    protocol_version = "HTTP/1.1"
    prompts: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.prompts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"])
        body = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\ndata: [DONE]\n\n'
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


async def edit(root: Path, name: str, url: str, requests: int) -> dict[str, Any]:
    client = LanguageClient("editor", "1")
    await client.start_io(sys.executable, "-m", "lmworks", "lsp", "--server", url, "--model", "any")
    await client.initialize_async(types.InitializeParams(types.ClientCapabilities(), root_uri=root.as_uri()))
    client.initialized(types.InitializedParams())
    file, saved = root / name, root / "saved_by_benchmark.py"
    text = file.read_text()
    uri = file.as_uri()
    opened = types.TextDocumentItem(uri, types.LanguageKind.Python, 1, text)
    client.text_document_did_open(types.DidOpenTextDocumentParams(opened))
    line = text.count("\n") // 2
    seconds: list[float] = []
    for turn in range(requests):
        at = types.Position(line, 0)
        change = types.TextDocumentContentChangePartial(types.Range(at, at), "x")
        version = types.VersionedTextDocumentIdentifier(turn + 2, uri)
        client.text_document_did_change(types.DidChangeTextDocumentParams(version, [change]))
        saved.write_text(f"value = {turn}\n")
        began = time.perf_counter()
        await client.text_document_completion_async(
            types.CompletionParams(types.TextDocumentIdentifier(uri), types.Position(line, 1))
        )
        seconds.append(time.perf_counter() - began)
        if not turn:
            await asyncio.sleep(PAUSE_S)  # somebody reads before he types on, and the index is made
    memory = rss(client._server.pid)  # type: ignore[union-attr]
    await client.shutdown_async(None)
    client.exit(None)
    await client.stop()
    later = seconds[1:]
    return {
        "first request, s": round(seconds[0], 3),
        "later requests, median s": round(statistics.median(later), 4),
        "later requests, longest s": round(max(later), 4),
        "resident memory, MB": round(memory / 1e6),
        "files in the prompt": Answer.prompts[-1].count("<file_sep>") - 1,
    }


def rss(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--name", default="now", help="of the column in the results")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found: dict[str, Any] = {}
    for title, key in PROJECTS.items():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "project"
            left_out = ("site-packages",) if key == "stdlib" else ()
            shutil.copytree(sysconfig.get_paths()[key], root, ignore=python_only(left_out), symlinks=True)
            files = sum(1 for _ in root.rglob("*.py"))
            name = max(root.glob("*/*.py"), key=lambda path: (path.stat().st_size < 100_000) * path.stat().st_size)
            asked = edit(
                root, name.relative_to(root).as_posix(), f"http://127.0.0.1:{server.server_port}", options.requests
            )
            found[title] = {"files": files, **asyncio.run(asked)}
            print(options.name, title, json.dumps(found[title]), flush=True)
    server.shutdown()
    if options.save:
        path = RESULTS / f"{RESULT}.json"
        before = json.loads(path.read_text())["columns"] if path.exists() else {}
        print(write_result(RESULT, {"load": os.getloadavg()[0], "columns": {**before, options.name: found}}))


def python_only(left_out: tuple[str, ...]) -> Any:
    def ignore(folder: str, names: list[str]) -> list[str]:
        return [
            name
            for name in names
            if name in left_out or not (name.endswith(".py") or os.path.isdir(os.path.join(folder, name)))
        ]

    return ignore


if __name__ == "__main__":
    main()
