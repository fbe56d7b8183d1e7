"""The gateway's page before a gateway under load: what it shows is what happens, also when a server and then the
gateway itself is gone.

SCREENSHOTS=FOLDER make test-browser    # keeps pictures
"""

import asyncio
import os
import shutil
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from gateway_case import Answering, fake_server, pool_file, running, say

pytestmark = pytest.mark.browser

ALERT = {
    "labels": {"alertname": "ServerDown", "severity": "warning"},
    "annotations": {"summary": "two does not answer", "runbook_url": "https://example.org/server-down.md"},
    "state": "firing",
    "activeAt": "2026-01-01T00:00:00Z",
}
EXTRA = '[[slos]]\nname = "chat"\nttft = 30.0\nobjective = 0.99\n[monitoring]\nprometheus = "{}"\n'


async def slow(asked, answering):
    await say(asked, answering, *"abcdefgh", gap=0.02)


@asynccontextmanager
async def opened(url, **screen):
    """The page, and what went wrong in it."""
    from playwright.async_api import async_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = await (await browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **screen})).new_page()
        wrong = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "Content Security" in said.text else None)
        page.on("request", lambda one: None if one.url.startswith((url, "data:")) else wrong.append(one.url))
        await page.goto(f"{url}/dashboard")
        yield page, wrong
        await browser.close()


async def prometheus(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    await Answering(writer).whole({"status": "success", "data": {"alerts": [ALERT]}})


async def until(page, expression):
    """By looks from outside: the page's policy allows no evaluation inside."""
    async with asyncio.timeout(30):
        while not await page.evaluate(expression):
            await asyncio.sleep(0.05)


async def picture(page, name):
    if folder := os.environ.get("SCREENSHOTS"):
        await page.screenshot(path=f"{folder}/{name}.png", full_page=True)


async def rows(page, name):
    return await page.eval_on_selector_all(
        f"#{name} tbody tr", "lines => lines.map(line => [...line.cells].map(cell => cell.textContent))"
    )


def test_the_page_follows_a_gateway_under_load(tmp_path):
    async def main():
        listening = await asyncio.start_server(prometheus, "127.0.0.1", 0)
        monitoring = EXTRA.format(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        async with (
            fake_server(slow) as one,
            fake_server(slow) as two,
            running(pool_file(tmp_path / "g.toml", one, two, extra=monitoring)) as case,
        ):
            load = [asyncio.create_task(ask_on(case)) for _ in range(6)]
            async with opened(str(case.http.base_url).rstrip("/")) as (page, wrong):
                await until(page, "document.querySelectorAll('#models tbody tr').length")
                await until(
                    page, "[...document.querySelectorAll('#servers td:nth-child(4)')].some(c => +c.textContent)"
                )
                await picture(page, "gateway-dashboard")
                assert await page.inner_text("#state") == "up"
                assert [line[:3] for line in await rows(page, "servers")] == [
                    [server.url, "fake", "yes"] for server in (one, two)
                ]
                [model] = await rows(page, "models")
                assert model[0] == "m" and int(model[1]) > 0 and all(" / " in cell for cell in model[2:5])
                [slo] = await rows(page, "slos")
                assert slo[:3] == ["chat", "99.00%", "100.00%"]
                assert await rows(page, "alerts") == [["ServerDown", "firing", "warning", "two does not answer"]]
                assert await page.get_attribute("#alerts a", "href") == "https://example.org/server-down.md"
                two.die()
                await until(page, "document.querySelector('#servers tr:nth-child(2) .bad')?.textContent === 'no'")
                assert (await rows(page, "servers"))[1][7] != ""  # why
                await picture(page, "gateway-dashboard-server-down")
                await page.set_viewport_size({"width": 360, "height": 700})
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                await picture(page, "gateway-dashboard-phone")
                for task in load:
                    task.cancel()
                await asyncio.gather(*load, return_exceptions=True)
                await page.route("**/gateway/overview", lambda route: route.abort("connectionrefused"))
                await until(page, "document.getElementById('state').textContent.includes('does not answer; this is')")
                assert len(await rows(page, "servers")) == 2
                assert wrong == []

    asyncio.run(main())


async def ask_on(case):
    while True:
        with suppress(httpx.HTTPError):  # of streams that were on the server that dies
            await case.events()
