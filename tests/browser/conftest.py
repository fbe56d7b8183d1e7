"""Debian's chromium, with nothing around it that could reach a network."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "no chromium on this machine: make test-browser installs it"
    # Chromium's sandbox does not work for root, which is who runs in most containers.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, tmp_path):
    """Opens HTML as a file. When the test ends: nothing was fetched, nothing went wrong."""
    wrong, contexts, opened = [], [], []

    def open_page(html, **screen):
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **screen})
        contexts.append(context)
        opened.append(path.as_uri())
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url in opened else wrong.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
