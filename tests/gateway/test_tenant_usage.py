"""Usage and budgets: every token once, whatever becomes of the request, its client or the gateway's store."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway_case import Answering, Asked, Running, chunk, fake_server, running, say
from lmworks.gateway.exchange import Usage
from lmworks.gateway.stream_events import UsageFields
from lmworks.gateway.tenants.database import SQLiteDatabase, StoreDown, open_database
from lmworks.gateway.tenants.journal import Journal, JournalDown
from lmworks.gateway.tenants.limits import Limits, period_ends, periods_of
from lmworks.gateway.tenants.store import Store
from lmworks.gateway.tenants.usage import UsageRecord
from tenant_case import administered, bearer, make_tenant, tenant_file

PRICES = "price_in = 0.15\nprice_out = 0.6"


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


async def ask(case: Running, key: str, **body: Any) -> httpx.Response:
    return await case.http.post(
        "/v1/chat/completions", json={"model": "m", "messages": [], **body}, headers=bearer(key)
    )


def used(file: Path, by: str = "outcome") -> dict[str, dict[str, Any]]:
    with administered(file) as admin:
        return {row.pop(by): row for row in admin.usage([by])}


def journaled(tokens: str, content: dict[str, Any]) -> bytes:
    return f": tokens {tokens}\ndata: {json.dumps(content)}\n\n".encode()


def test_tokens_and_money_of_answers_and_streams(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, pool=PRICES)
            key = make_tenant(file)
            async with running(file) as case:
                for stream in (True, False):
                    assert (await ask(case, key, stream=stream)).status_code == 200
            (row,) = used(file, "tenant").values()
            # Twice 3 prompt tokens for 0.15 $ a million, and 2 generated ones for 0.6.
            assert row == {
                "requests": 2, "prompt_tokens": 6, "completion_tokens": 4, "cached_tokens": 0,
                "dollars": pytest.approx(2 * (3 * 0.15 + 2 * 0.6) / 1e6, rel=1e-12), "estimated": 0,
            }  # fmt: skip

    asyncio.run(main())


def test_prompt_tokens_of_anthropics_messages_are_with_those_of_caches() -> None:
    """Its input_tokens are without them; both APIs are billed for the same prompt alike."""
    said = b'{"input_tokens": 3, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2, "output_tokens": 4}'
    assert msgspec.json.decode(said, type=UsageFields).usage() == Usage(10, 4, 5)
    said = b'{"input_tokens": 10, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 4}'
    assert msgspec.json.decode(said, type=UsageFields).usage() == Usage(10, 4, 5)


def test_a_client_that_leaves_pays_for_what_was_generated(tmp_path: Path) -> None:
    """Of a server of ours exactly, by the tokens that it names; of another one by its events, as an estimate."""

    async def endless(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        await answering.send(b": prompt 11\n" + journaled("0 1 2 3", chunk("a")) + journaled("0 4", chunk("b")))
        await asyncio.sleep(60)

    async def other(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        for word in ("", "a", "b", "c"):
            await answering.event(chunk(word))
        await asyncio.sleep(60)

    async def main() -> None:
        for behave, kind, tokens, estimated in ((endless, "lmworks", (11, 4), 0), (other, "openai", (None, 3), 1)):
            async with fake_server(behave) as server:
                folder = tmp_path / kind
                folder.mkdir()
                file = tenant_file(folder / "g.toml", server, kind=kind)
                key = make_tenant(file)
                async with running(file) as case:
                    seen = ""
                    body = {"model": "m", "messages": [], "stream": True}
                    async with case.http.stream(
                        "POST", "/v1/chat/completions", json=body, headers=bearer(key)
                    ) as answer:
                        async for text in answer.aiter_text():
                            seen += text
                            if seen.count('"content"') >= (2 if kind == "lmworks" else 4):
                                break
                        assert "prompt" not in seen and "tokens" not in seen
                    await case.until(lambda: server.left == 1)
                row = used(file)["client_left"]
                prompt = row["prompt_tokens"] if tokens[0] is None else tokens[0]
                assert (row["prompt_tokens"], row["completion_tokens"]) == (prompt, tokens[1]) and prompt > 0
                assert row["estimated"] == estimated

    asyncio.run(main())


def test_a_stream_that_moves_to_another_server_counts_once(tmp_path: Path) -> None:
    first = True

    async def serve(asked: Asked, answering: Answering) -> None:
        nonlocal first
        answering.begin_stream()
        if first:
            first = False
            await answering.send(b": prompt 7\n" + journaled("0 1 2", chunk("a ")))
            answering.die()
            return
        assert asked.json["continuation"]["answers"] == [[1, 2]]
        await answering.send(b": prompt 7\n" + journaled("0 3", chunk("b", finish="stop")))
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        await answering.event(chunk("", choices=[], usage=usage))
        await answering.end()

    async def main() -> None:
        async with fake_server(serve) as a, fake_server(serve) as b:
            file = tenant_file(tmp_path / "g.toml", a, b, kind="lmworks")
            key = make_tenant(file)
            async with running(file) as case:
                assert (await ask(case, key, stream=True)).status_code == 200
                assert len(a.asked) == len(b.asked) == 1
            row = used(file)["finished"]
            assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (1, 7, 3)

    asyncio.run(main())


def test_failed_requests_cost_nothing_and_refused_ones_are_no_requests(tmp_path: Path) -> None:
    async def refuse(asked: Asked, answering: Answering) -> None:
        await answering.whole({"error": {"message": "no", "code": "bad", "type": "t", "param": "n"}}, 400)

    async def main() -> None:
        async with fake_server(refuse) as server:
            file = tenant_file(tmp_path / "g.toml", server, pool=PRICES)
            key = make_tenant(file, tokens_total=1000)
            async with running(file) as case:
                assert (await ask(case, key)).status_code == 400
                assert (await ask(case, key, max_tokens=5000)).json()["error"]["code"] == "insufficient_quota"
                assert (await ask(case, key)).status_code == 400
            assert list(used(file)) == ["failed"]
            row = used(file)["failed"]
            assert (row["requests"], row["prompt_tokens"], row["completion_tokens"], row["dollars"]) == (2, 0, 0, 0)

    asyncio.run(main())


def test_budgets_hold_side_by_side_and_over_a_restart(tmp_path: Path) -> None:
    """Each request uses 3 + 2 tokens and may use 100: of 250 there is room for two at once, and for 31 in turn."""
    go_on = asyncio.Event()

    async def wait(asked: Asked, answering: Answering) -> None:
        await go_on.wait()
        await hello(asked, answering)

    async def main() -> None:
        async with fake_server(wait) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            key = make_tenant(file, tokens_per_day=250)
            async with running(file) as case:
                asking = [asyncio.ensure_future(ask(case, key, max_tokens=80)) for _ in range(4)]
                await case.until(lambda: sum(one.done() for one in asking) == 2)
                go_on.set()
                answers = sorted(await asyncio.gather(*asking), key=lambda one: one.status_code)
                assert [one.status_code for one in answers] == [200, 200, 429, 429]
                error = answers[-1].json()["error"]
                assert error["code"] == "insufficient_quota" and "tokens_per_day = 250" in error["message"]
                assert 0 < int(answers[-1].headers["retry-after"]) <= 86400
                for _ in range(20):
                    assert (await ask(case, key, max_tokens=80)).status_code == 200
            async with running(file) as case:  # 110 are spent
                assert (await ask(case, key, max_tokens=200)).status_code == 429
                assert (await ask(case, key, max_tokens=80)).status_code == 200
                with administered(file) as admin:
                    admin.update_tenant("acme", None, {"tokens_per_day": 1000}, None, None)
                async with asyncio.timeout(5):
                    while (await ask(case, key, max_tokens=200)).status_code != 200:
                        await asyncio.sleep(0.02)

    asyncio.run(main())


def test_a_budget_in_dollars_counts_the_dearest_pool_before_and_the_one_that_answered_after(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, pool="price_in = 100.0\nprice_out = 1000.0")
            key = make_tenant(
                file, dollars_per_month=0.05
            )  # 2.3 thousandths each; 32 may be generated of 1000 $ a million
            async with running(file) as case:
                assert (await ask(case, key, max_tokens=60)).status_code == 429
                count = 0
                while (await ask(case, key, max_tokens=32)).status_code == 200:
                    count += 1
                spent = count * (3 * 100 + 2 * 1000) / 1e6
                assert spent <= 0.05 < spent + 0.04 and count > 2

    asyncio.run(main())


# --- the journal ------------------------------------------------------------------------------------------


def open_one(journal: Journal, id: str) -> Any:
    return journal.begin(id, time.time(), "acme", "lmw-a", "m", "/v1/completions")


def record(id: str, prompt: int = 5, completion: int = 7, began: float | None = None) -> UsageRecord:
    now = time.time() if began is None else began
    return UsageRecord(
        id, now, now, "acme", "lmw-a", "m", "p", "/v1/completions", prompt, completion, 0, 9, "finished", False
    )


def test_what_a_killed_gateway_had_counted_is_recovered(tmp_path: Path) -> None:
    """Nothing is closed: the second journal reads what the kernel has of the first."""
    first = Journal(tmp_path)
    done, under_way, unasked, void = (open_one(first, id) for id in ("done", "under way", "unasked", "void"))
    first.end(done, record("done"))
    first.slots.set_server(under_way.slot, 100, 600, "pool")
    first.slots.count_tokens(under_way.slot, 40, 2, 0, True)
    first.slots.count_tokens(under_way.slot, 40, 3, 1, True)
    first.end(void, None)
    os.write(first.file, b'{"usage": {"id": "torn')
    os.close(first.lock)  # as a kill does
    assert unasked.slot != under_way.slot
    second = Journal(tmp_path)
    found = {one.id: one for one in second.recovered}
    assert found.keys() == {"done", "under way"}
    one = found["under way"]
    assert (one.prompt_tokens, one.completion_tokens, one.cached_tokens, one.pool) == (40, 3, 1, "pool")
    assert (one.nanodollars, one.outcome, one.estimated) == (40 * 100 + 3 * 600, "interrupted", False)


def test_a_slot_that_another_request_has_taken_is_not_read_for_the_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    line = open_one(journal, "one")
    journal.slots.set_server(line.slot, 1, 1, "pool")
    journal.slots.count_tokens(line.slot, 1, 1, 0, True)
    assert journal.slots.read(line.slot, line.number) is not None
    journal.end(line, record("one"))
    again = open_one(journal, "two")
    assert again.slot == line.slot and journal.slots.read(line.slot, line.number) is None


def test_more_requests_than_slots_and_files_that_turn_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.gateway.tenants.journal.SEGMENT_BYTES", 100_000)
    journal = Journal(tmp_path)
    lines = [open_one(journal, str(number)) for number in range(3000)]
    for line in lines:
        journal.slots.set_server(line.slot, 1, 1, "p")
        journal.slots.count_tokens(line.slot, line.number, 1, 0, True)
    for line in lines[:2990]:
        journal.end(line, record(line.id))
    old = journal.turn_over()
    assert len(old) == 1
    journal.forget(old)  # its usage is in the store
    os.close(journal.lock)
    found = Journal(tmp_path).recovered
    assert sorted(one.prompt_tokens for one in found) == list(range(2991, 3001))


def test_two_gateways_do_not_write_into_one_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(Exception, match="another gateway writes into"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path)


def test_records_that_come_twice_count_once(tmp_path: Path) -> None:
    store = Store(open_database(f"sqlite:///{tmp_path}/a.db"))
    store.prepare()
    store.add_usage([record("a"), record("b")])
    store.add_usage([record("b"), record("c"), record("c")])
    periods = periods_of(time.time())
    spent = store.spent(periods)
    assert {place: (one.requests, one.tokens) for place, one in spent.items()} == {
        (subject, period): (3, 36) for subject in ("tenant:acme", "key:lmw-a") for period in periods
    }


# --- stores that fail -------------------------------------------------------------------------------------


class Breakable(SQLiteDatabase):
    broken = False

    def transaction(self) -> Any:
        if self.broken:
            raise StoreDown("the store is away")
        return super().transaction()


def break_store(case: Running, broken: bool) -> None:
    tenancy = case.gateway.proxy.tenancy
    assert tenancy is not None
    database: Any = tenancy.store.database
    database.__class__ = Breakable
    database.broken = broken


@pytest.mark.parametrize("policy", ["open", "closed"])
def test_a_store_that_is_away_and_comes_back(tmp_path: Path, policy: str) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, tenants=f'store_down = "{policy}"')
            key = make_tenant(file)
            async with running(file) as case:
                tenancy = case.gateway.proxy.tenancy
                assert tenancy is not None and (await ask(case, key)).status_code == 200
                break_store(case, True)
                await case.until(lambda: tenancy.ledger.store_error)
                answer = await ask(case, key)
                if policy == "open":
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 503 and answer.json()["error"]["code"] == "store_unavailable"
                    assert answer.headers["retry-after"] == "1"
                break_store(case, False)
                await case.until(lambda: tenancy.ledger.store_error is None)
                assert (await ask(case, key)).status_code == 200
            assert used(file)["finished"]["requests"] == (3 if policy == "open" else 2)

    asyncio.run(main())


@pytest.mark.parametrize("policy", ["open", "closed"])
def test_a_disk_without_room_for_the_journal(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Journal.write
    full = False

    def write(journal: Journal, line: Any) -> None:
        if full:
            raise JournalDown(os.strerror(errno.ENOSPC))
        real(journal, line)

    monkeypatch.setattr(Journal, "write", write)

    async def main() -> None:
        nonlocal full
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, tenants=f'journal_down = "{policy}"')
            key = make_tenant(file, concurrent_requests=1)
            async with running(file) as case:
                full = True
                for _ in range(2):
                    answer = await ask(case, key)
                    assert answer.status_code == (200 if policy == "open" else 503)
                full = False
                assert (await ask(case, key)).status_code == 200
            assert used(file)["finished"]["requests"] == 1

    asyncio.run(main())


def test_periods_and_their_ends() -> None:
    at = 1772323199.0  # 2026-02-28 23:59:59 UTC
    assert periods_of(at) == ("2026-02-28", "2026-02", "total")
    assert period_ends(at) == {"day": 1.0, "month": 1.0}
    assert period_ends(at - 86399) == {"day": 86400.0, "month": 86400.0}
    assert Limits(tokens_total=5).over(Limits(tokens_total=9, requests_per_minute=3)).given_values() == {
        "tokens_total": 5,
        "requests_per_minute": 3,
    }
