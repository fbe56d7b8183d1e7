"""`lmworks learn serve`: the course's pages, for this machine's browser alone.

A request is answered if its Host is this server (a site whose name was made to lead here has another one) and its
address begins with the token (which other users of this machine do not know).
"""

from __future__ import annotations

import hmac
import secrets
import signal
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ...spec.errors import LMWorksError, SpecError
from ..checking.verdict import Verdict
from ..checking.worker import CheckWorker
from ..exercise import exercises
from ..goals import readings
from ..interview import questions
from ..progress import record_answers, record_verdict, take_hint
from ..quizzes import Quizzed, find_quiz, quiz_names
from ..tracks import lesson, lesson_names
from ..what_if import Setting
from ..workspace import Workspace
from .cheat_sheet import cheat_sheet_body
from .interview import InterviewPages
from .pages import PAGE_POLICY, Pages

HOST = "127.0.0.1"
BODY_BYTES = 1 << 14  # of a form
IDLE_S = 30.0  # that a request may take to arrive
RESTART_S = 1.0  # until a worker that ended is started anew
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"{PAGE_POLICY}; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",  # the token stays here
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Refused(Exception):
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class PageServer(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, workspace: Workspace, port: int = 0) -> None:
        super().__init__((HOST, port), Handler)
        self.token = secrets.token_urlsafe(16)
        self.pages = Pages(workspace, f"/{self.token}")
        self.interview = InterviewPages(self.pages)
        self.worker = CheckWorker(workspace.folder)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Until a signal. This thread starts the workers: they end with it."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            threading.Thread(target=self.serve_forever, daemon=True).start()
            while True:
                self.worker.process.wait()
                time.sleep(RESTART_S)
                self.worker.start()
        finally:
            self.worker.end()
            self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # the reader went to another page
            super().handle_error(request, client_address)

    # --- what is answered --------------------------------------------------------------------------------

    def get(self, path: list[str], query: dict[str, str]) -> str:
        match path:
            case [""]:
                return self.pages.home()
            case ["plan"]:
                return self.pages.plan()
            case ["lesson", name] if name in exercises():
                return self.pages.lesson(exercises()[name])
            case ["reading", name] if name in readings():
                return self.pages.reading(readings()[name])
            case ["tracks"]:
                return self.pages.tracks()
            case ["tracks", name] if name in lesson_names():
                return self.pages.track_lesson(lesson(name))
            case ["interview"]:
                return self.interview.next()
            case ["interview", name] if name in questions():
                return self.interview.question(questions()[name])
            case ["cheatsheet"]:
                return self.pages.document("Cheat sheet", cheat_sheet_body(self.pages))
            case ["what-if"]:
                return self.pages.what_if(Setting.of(query))
            case ["what-if", "tables"]:
                return self.pages.tables(Setting.of(query))
        raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def post(self, path: list[str], form: dict[str, str]) -> str:
        folder = self.pages.workspace.folder
        match path:
            case ["quiz", name] if name in quiz_names():
                return self.answer_quiz(find_quiz(name), form)
            case ["hint", name] if name in exercises():
                take_hint(folder, exercises()[name])
                return self.pages.hints(exercises()[name])
            case ["check", name] if name in exercises():
                verdict = Verdict(**self.worker.ask("check", name))
                record_verdict(folder, verdict)
                return self.pages.work(exercises()[name], verdict)
            case ["effect", name] if name in exercises():
                return self.pages.effect(self.worker.ask("effect", name)["lines"])
            case ["rubric", name] if name in questions():
                return self.interview.rubric(questions()[name])
            case ["said", name] if name in questions():
                return self.interview.say(questions()[name], form)
            case ["number", name] if name in questions():
                return self.interview.calculate(questions()[name], form)
        raise Refused(HTTPStatus.NOT_FOUND, "there is no such action")

    def answer_quiz(self, asked: Quizzed, form: dict[str, str]) -> str:
        choices = {str(number): range(len(one.choices)) for number, one in enumerate(asked.quiz)}
        given = {int(number): int(form[number]) for number, known in choices.items()
                 if form.get(number, "") in map(str, known)}  # fmt: skip
        if len(given) != len(asked.quiz):
            raise SpecError("an answer to each question, please")
        record_answers(
            self.pages.workspace.folder, asked.id, [given[at] == one.answer for at, one in enumerate(asked.quiz)]
        )
        return self.pages.quiz(asked, given)


class Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "lmworks", ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        try:
            status, text = HTTPStatus.OK, self.answer_of()
        except Refused as error:
            status, text = error.status, f'<p class="bad">{error}</p>'
        except (LMWorksError, OSError) as error:
            status, text = HTTPStatus.CONFLICT, self.server.pages.error(error)
        body = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def answer_of(self) -> str:
        hosts = {f"{name}:{self.server.port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") not in hosts:
            raise Refused(HTTPStatus.FORBIDDEN, "another host is asked for")
        url = urlsplit(self.path)
        token, *path = url.path.removeprefix("/").split("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            raise Refused(HTTPStatus.FORBIDDEN, "the token in the address is wrong")
        if self.command == "GET":
            return self.server.get(path, dict(parse_qsl(url.query)))
        if self.headers.get("Origin", "http://" + self.headers["Host"]) != "http://" + self.headers["Host"]:
            raise Refused(HTTPStatus.FORBIDDEN, "a page of another site sent this")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a form of at most {BODY_BYTES} bytes is expected")
        return self.server.post(path, dict(parse_qsl(self.rfile.read(int(length)).decode(errors="replace"))))

    def log_message(self, *_: object) -> None:
        """The terminal stays as it is."""
