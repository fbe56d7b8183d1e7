"""The drills: what is planted, which alert must fire, what users may see, and the runbook's commands."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import signal
import socket
import threading
import time
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx

from ..spec import LMWorksError, dump_toml
from ..spec.files import write_whole
from .incident import TENANTS, Check, Drill, Impact, Stage
from .load import PROMPTS, Tenant
from .local_fleet import MODEL, Shape, train_model
from .rollout import Candidate, write_gate
from .surroundings import fill_disk, redis_pid, write_certificate

STATUS = "lmworks fleet status --folder $FLEET"
RESTART = "lmworks fleet restart $SERVER --folder $FLEET --now"
SERVERS = "curl -s $GATEWAY/gateway/servers"
ROLLOUTS = "curl -s $GATEWAY/gateway/rollouts"

LARGEST = 64 * 2**10  # bytes of an allocation where memory runs out: a step of decoding needs less
IDLE, SPARE = 300, 16  # connections that a client leaves open; descriptors that are left
ADAPTER = "helper"
# One sequence at a time, so that a few requests a second are more than it can do; and time for those that wait.
SMALL = Shape(
    options=("engine.max_seqs=1",),
    limits={"queue": 48, "queue_seconds": 0.0},
    gateway={"timeouts": {"connect": 1.0, "first_token": 120.0, "idle": 3.0, "per_try": 150.0, "total": 150.0}},
)


# --- servers ---------------------------------------------------------------------------------------------


def kill_server(stage: Stage) -> None:
    stage.fleet.kill(stage.victim)


def stop_server(stage: Stage) -> None:
    stage.fleet.signal(stage.victim, signal.SIGSTOP)


def kill_engine(stage: Stage) -> None:
    os.kill(stage.fleet.engine(stage.victim), signal.SIGKILL)


def stop_engine(stage: Stage) -> None:
    os.kill(stage.fleet.engine(stage.victim), signal.SIGSTOP)


def slow_engine(stage: Stage) -> None:
    throttle(stage, stage.fleet.engine(stage.victim))


def throttle(stage: Stage, pid: int) -> None:
    """It gets a tenth of the time: stopped for 180 ms, goes on for 20."""
    over = stage.memory["over"] = threading.Event()

    def run() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.18)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.02)

    threading.Thread(target=run, daemon=True).start()


def end_throttle(stage: Stage) -> None:
    """The process that it slowed is gone; where it is not, it goes on at full speed."""
    stage.memory["over"].set()


def exhaust_memory(stage: Stage) -> None:
    """Allocations of the engine that are larger than LARGEST fail, and it gets a prompt that needs them."""
    pid = stage.fleet.engine(stage.victim)
    (stage.fleet.folder / f"{pid}.allocation").write_text(str(LARGEST), encoding="utf-8")
    time.sleep(1.1)  # it looks once a second
    long = {"model": MODEL, "prompt": "x = 1\n" * 60, "max_tokens": 8, "temperature": 0}
    with suppress(httpx.HTTPError):
        httpx.post(f"{stage.fleet.server_url(stage.victim)}/v1/completions", json=long, timeout=20, trust_env=False)


def lose_model(stage: Stage) -> None:
    """The model's files are away when the engine has to start again."""
    stage.fleet.model.rename(lost_model(stage))
    kill_engine(stage)


def find_model(stage: Stage) -> None:
    if lost_model(stage).exists():
        lost_model(stage).rename(stage.fleet.model)
        stage.note("the model's files are back")


def lost_model(stage: Stage) -> Path:
    return stage.fleet.model.with_name(f".{stage.fleet.model.name}-lost")


def kill_all(stage: Stage) -> None:
    for name in stage.fleet.names:
        stage.fleet.kill(name)


# --- the network between gateway and servers -------------------------------------------------------------


def cut_network(stage: Stage) -> None:
    stage.proxies[0].cut = True


def slow_network(stage: Stage) -> None:
    stage.proxies[0].delay = 0.2


def slow_every_network(stage: Stage) -> None:
    for proxy in stage.proxies:
        proxy.delay = 0.2


def reset_network(stage: Stage) -> None:
    stage.proxies[0].reset = 0.05


def mend_network(stage: Stage) -> None:
    for proxy in stage.proxies:
        proxy.cut, proxy.delay, proxy.reset = False, 0.0, 0.0
    stage.note("the network is repaired")


# --- the gateway -----------------------------------------------------------------------------------------


def kill_gateway(stage: Stage) -> None:
    stage.fleet.kill("gateway")


def restart_gateway(stage: Stage) -> None:
    os.kill(stage.fleet.pid("gateway"), signal.SIGTERM)


def exhaust_descriptors(stage: Stage) -> None:
    """A client that opens a connection for each request and closes none; and the gateway may open few more."""
    address = ("127.0.0.1", stage.fleet.port)
    stage.memory["idle"] = [keep_open(address) for _ in range(IDLE)]
    pid = stage.fleet.pid("gateway")
    used = len(os.listdir(f"/proc/{pid}/fd"))
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + SPARE, hard))


def keep_open(address: tuple[str, int]) -> socket.socket:
    """A connection that has had one answer, and stays."""
    one = socket.create_connection(address, timeout=5)
    one.sendall(b"GET /health HTTP/1.1\r\nhost: gateway\r\n\r\n")
    one.recv(1000)
    return one


def descriptors_left(stage: Stage) -> list[Check]:
    pid = stage.fleet.pid("gateway")
    used, limit = len(os.listdir(f"/proc/{pid}/fd")), resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    for one in stage.memory["idle"]:
        one.close()
    return [Check("descriptors are left", used < limit / 2, "less than half is open", f"{used} of {limit}")]


def break_config(stage: Stage) -> None:
    config = stage.fleet.folder / "gateway.toml"
    stage.memory["config"] = config.read_text(encoding="utf-8")
    (stage.fleet.folder / "gateway.toml.good").write_text(stage.memory["config"], encoding="utf-8")
    config.write_text(stage.memory["config"].replace("[health]", "[healthy]"), encoding="utf-8")


# --- what it stands on -----------------------------------------------------------------------------------


def kill_redis(stage: Stage) -> None:
    os.kill(redis_pid(stage.fleet.folder), signal.SIGKILL)


def fill(stage: Stage) -> None:
    fill_disk(stage.fleet.disk)


def expire_certificate(stage: Stage) -> None:
    """The time of one server's certificate has come: it takes the new file as at every renewal. Connections that are
    there stay, so those of the gateway end."""
    write_certificate(stage.fleet.folder, stage.victim, days=-1)
    stage.fleet.kill(stage.victim)


def skew_clock(stage: Stage) -> None:
    for pid in stage.fleet.group(stage.victim):
        (stage.fleet.folder / str(pid)).write_text("7200", encoding="utf-8")


def set_clock(stage: Stage) -> None:
    for pid in stage.fleet.group(stage.victim):
        (stage.fleet.folder / str(pid)).unlink(missing_ok=True)
    stage.note("the clock is set")


def cut_metrics(stage: Stage) -> None:
    stage.proxies[-1].cut = True


# --- what is served --------------------------------------------------------------------------------------


def serve_adapter(stage: Stage) -> None:
    """A good version of an adapter, and a check of its answers that the gateway asks every second."""
    folder, config = stage.fleet.folder / "adapters", stage.fleet.gateway_file
    for name, scale in (("good", 0.0), ("noise", 1.0)):
        write_adapter(folder / name, stage.fleet.folder, scale)
    for name in stage.fleet.names:
        load_adapter(stage, name, "good")
    body = {"model": ADAPTER, "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0}
    answer = httpx.post(
        f"{stage.fleet.server_url(stage.victim)}/v1/completions", json=body, timeout=30, trust_env=False
    )
    check = {
        "model": ADAPTER, "prompt": PROMPTS[0], "expect": f"^{re.escape(answer.json()['choices'][0]['text'])}$",
        "every": 1.0,
    }  # fmt: skip
    content = tomllib.loads(config.read_text(encoding="utf-8"))
    write_whole(config, dump_toml({**content, "quality_checks": [check]}))


def replace_adapter(stage: Stage) -> None:
    """A new version of the adapter on every server: its weights are noise."""
    for name in stage.fleet.names:
        body = {"lora_name": ADAPTER}
        httpx.post(
            f"{stage.fleet.server_url(name)}/v1/unload_lora_adapter", json=body, timeout=30, trust_env=False
        ).raise_for_status()
        load_adapter(stage, name, "noise")
    stage.memory["loaded"] = stage.now()


def load_adapter(stage: Stage, server: str, version: str) -> None:
    body = {"lora_name": ADAPTER, "lora_path": str(stage.fleet.folder / "adapters" / version)}
    url = f"{stage.fleet.server_url(server)}/v1/load_lora_adapter"
    found = httpx.post(url, json=body, timeout=30, trust_env=False)
    if found.status_code != 200:
        raise LMWorksError(f"the adapter was not loaded: {found.text[:200]}")


def write_adapter(folder: Path, fleet: Path, scale: float) -> None:
    """Of one projection; with `scale` 0 the model answers as without it."""
    import numpy as np
    from safetensors.numpy import save_file

    luck, start = np.random.default_rng(0), "base_model.model.model.layers.0.mlp.down_proj.lora"
    ffn, hidden = mlp_shape(fleet)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4096}))
    a, b = luck.normal(size=(2, ffn)), scale * luck.normal(size=(hidden, 2))
    tensors = {f"{start}_A.weight": a.astype("float32"), f"{start}_B.weight": b.astype("float32")}
    save_file(tensors, folder / "adapter_model.safetensors")


def mlp_shape(folder: Path) -> tuple[int, int]:
    """(ffn, hidden) of the fleet's model."""
    model = tomllib.loads((folder / "fleet.toml").read_text(encoding="utf-8"))["models"][0]["source"]
    found = tomllib.loads((Path(model) / "spec.toml").read_text(encoding="utf-8"))["model"]
    return int(found["ffn"]), int(found["hidden"])


def was_nonsense(stage: Stage) -> list[Check]:
    """That the fault was one: between it and the first command its answers were wrong. Now they are right."""
    began, acted = stage.memory["loaded"], next(one.at for one in stage.commands if one.line in stage.drill.act)
    during = [o.end for o in stage.outcomes(began) if o.tenant == PINK.name and o.at + o.seconds < acted]
    after = [one.end for one in stage.outcomes(stage.ended) if one.tenant == PINK.name]
    right = after.count("ok")
    return [
        Check(
            "its answers were nonsense", set(during) == {"wrong"}, "all", f"{during.count('wrong')} of {len(during)}"
        ),
        Check("and are right again", 0 < right == len(after), "all", f"{right} of {len(after)}"),
    ]


def poison_cache(stage: Stage) -> None:
    """Every block of keys and values that a server keeps on its disk: one bit of the content of each second one is
    flipped, the others hold what belongs to another block. Then the server starts again, with these files."""
    files = sorted((stage.fleet.folder / f"kv-{stage.victim}").glob("??/*.kv"))
    if len(files) < 4:
        raise LMWorksError(f"{stage.victim} has only {len(files)} blocks on its disk")
    contents = [one.read_bytes() for one in files]
    for number, file in enumerate(files):
        flipped = contents[number][:-1] + bytes([contents[number][-1] ^ 0x40])
        file.write_bytes(flipped if number % 2 else contents[number - 1])
    stage.note(f"{len(files)} blocks on the disk of {stage.victim} are damaged")
    stage.fleet.kill(stage.victim)


def prepare_bad_version(stage: Stage) -> None:
    """Another model, whose answers differ."""
    prepare_version(stage, train_model(stage.folder.parent / "bad", seed=1))
    stage.memory["theirs"] = [stage.memory["candidate"].answer(one) for one in stage.load.questions]


def prepare_slow_version(stage: Stage) -> None:
    prepare_version(stage, stage.fleet.model)


def prepare_version(stage: Stage, model: Path) -> None:
    candidate = stage.memory["candidate"] = Candidate(stage.fleet, model)
    candidate.start()
    candidate.answer(stage.load.questions[0])  # the first request of a process is a slow one


def roll_out_bad(stage: Stage) -> None:
    asked = stage.load.questions[:6]
    answers = [stage.load.expected[number] for number in range(len(asked))]
    stage.memory["candidate"].begin_rollout(write_gate(stage.folder, asked, answers))


def roll_out_slow(stage: Stage) -> None:
    """Its engine gets a tenth of a core; nobody compares answers."""
    throttle(stage, stage.memory["candidate"].engine())
    stage.memory["candidate"].begin_rollout(steps=[0.5], min_requests=5, latency_ratio=2.0)


def end_candidate(stage: Stage) -> None:
    if "over" in stage.memory:
        stage.memory["over"].set()
    if "candidate" in stage.memory:
        stage.memory["candidate"].stop()
    stage.fleet.stop()  # its gateway's file names the candidate


def rolled_back(stage: Stage) -> list[Check]:
    found = stage.memory["candidate"].rollout()
    state = str(found.get("state"))
    reason = f"{state}: {found.get('reason')}"
    return [Check("the new version is rolled back", state == "rolled_back", "rolled_back", reason)]


def only_its_own(stage: Stage) -> list[Check]:
    """Who was sent to the stable version got its answers: the wrong ones are those of the new one, to the letter."""
    theirs, wrong = stage.memory["theirs"], [one for one in stage.outcomes(0.0) if one.end == "wrong"]
    own = sum(one.text == theirs[one.question] for one in wrong)
    check = Check("wrong answers are the new version's", own == len(wrong), "all", f"{own} of {len(wrong)}")
    return [*rolled_back(stage), check]


# --- load ------------------------------------------------------------------------------------------------


def storm(stage: Stage) -> None:
    """More than the servers can do, from clients that ask again at once."""
    stage.load.rates["storm"] = 24.0


def end_storm(stage: Stage) -> None:
    stage.load.leave("storm")
    stage.note("the clients have gone")


FEW = tuple(replace(one, rate=0.5) for one in TENANTS)  # whom two servers of one sequence each can serve
STORM = Tenant("storm", 0.0, retries=3, limited=True)

FLOOD = Tenant("flood", 0.0, limited=True)
LONG = Tenant("long", 0.0, limited=True)  # answers
PINK = Tenant("pink", 2.0, model=ADAPTER)


def flood(stage: Stage) -> None:
    stage.load.rates["flood"] = 20.0


def end_flood(stage: Stage) -> None:
    stage.load.rates["flood"] = 0.0
    stage.note("the flood is over")


def salt_prompts(stage: Stage) -> None:
    stage.load.salted = True


def end_salt(stage: Stage) -> None:
    stage.load.salted = False
    stage.note("requests have no salt any more")


def try_keys(stage: Stage) -> None:
    """From many addresses: after some wrong keys one is refused with 429."""
    over = stage.memory["over"] = threading.Event()

    def run() -> None:
        for number in itertools.cycle(range(2, 100)):
            if over.wait(0.1):
                return
            transport = httpx.HTTPTransport(local_address=f"127.0.0.{number}")
            headers = {"authorization": f"Bearer lmw-stranger-{number:032}"}
            with httpx.Client(transport=transport, headers=headers, timeout=5) as client, suppress(httpx.HTTPError):
                client.post(f"{stage.fleet.url}/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})

    threading.Thread(target=run, daemon=True).start()


def end_tries(stage: Stage) -> None:
    stage.memory["over"].set()
    stage.note("nobody tries keys any more")


def flood_cache(stage: Stage) -> None:
    stage.load.rates["long"] = 24.0


def end_cache_flood(stage: Stage) -> None:
    stage.load.leave("long")
    stage.note("the clients have gone")


def limit_flood(stage: Stage) -> None:
    line = "lmworks gateway tenants update flood --limit requests_per_minute=60 --config $FLEET/gateway.toml"
    if stage.command(line).code:
        raise LMWorksError("the tenant's limit was not set")


DRILLS = (
    Drill(
        "server-killed", "kill -9 of a server and its engine, in the middle of streams", kill_server,
        alerts=("ServerDown", "StreamsMigrated"), look=(STATUS, SERVERS),
    ),
    Drill(
        "server-hung", "SIGSTOP of a server and its engine: connections stay open, nothing comes", stop_server,
        alerts=("ServerDown",), look=(STATUS, SERVERS), act=(RESTART,),
    ),
    Drill("engine-killed", "kill -9 of the engine of a server", kill_engine, alerts=("EngineRestarted",)),
    Drill(
        "engine-hung", "SIGSTOP of the engine: its server answers probes and makes no tokens", stop_engine,
        alerts=("EngineRestarted",), seconds=10.0,
    ),
    Drill(
        "engine-stalled", "SIGSTOP of the engine of a server, whose watchdog waits for two minutes", stop_engine,
        alerts=("EngineStalled",), within=40.0, act=(RESTART,),
        look=("curl -s $SERVER_URL/metrics | grep engine_stalled_seconds", SERVERS),
        shape=Shape(limits={"kill_seconds": 120.0}),
    ),
    Drill(
        "engine-gone", "kill -9 of the engine of a server, and the model's files are away: no other starts", lose_model,
        alerts=("EngineDown",), withdraw=find_model, clear=find_model, act=(RESTART,),
        look=(
            "curl -s $SERVER_URL/metrics | grep engine_restarts_total",
            "grep 'engine process ended' $FLEET/logs/$SERVER.log | tail -n 3",
        ),
    ),
    Drill(
        "engine-out-of-memory", "the engine's allocations of more than 64 KiB fail, and a prompt needs such",
        exhaust_memory, alerts=("EngineOutOfMemory", "EngineRestarted"), shape=Shape(memory=True),
    ),
    Drill(
        "server-slow", "the engine of a server gets a tenth of its core", slow_engine, alerts=("ServerSlow",),
        act=(RESTART,), withdraw=end_throttle, seconds=10.0,
    ),
    Drill(
        "all-servers-killed", "kill -9 of every server", kill_all, alerts=("PoolDown", "StreamsLost"),
        impact=Impact(lost=100, failed=100, refused=None), look=(STATUS, SERVERS),
    ),
    Drill(
        "network-partition", "the network between the gateway and a server is cut", cut_network,
        alerts=("ServerDown",), withdraw=mend_network, look=(STATUS, SERVERS), shape=Shape(proxied=True),
    ),
    Drill(
        "network-slow", "200 ms more each way between the gateway and a server", slow_network,
        alerts=("ServerSlow",), withdraw=mend_network, look=(SERVERS,), shape=Shape(proxied=True), seconds=10.0,
    ),
    Drill(
        "slo-missed", "200 ms more each way between the gateway and every server: first texts come too late",
        slow_every_network, alerts=("ErrorBudgetBurnFast",), withdraw=mend_network, seconds=10.0,
        look=("curl -s $GATEWAY/metrics | grep gateway_slo_missed_total", STATUS, SERVERS),
        shape=Shape(proxied=True, gateway={"slos": [{"ttft": 0.3, "objective": 0.99, "admit_below": 0.0}]}),
    ),
    Drill(
        "network-resets", "one of twenty packets from and to a server resets its connection", reset_network,
        alerts=("StreamsMigrated",), withdraw=mend_network, look=(SERVERS,), shape=Shape(proxied=True), seconds=10.0,
    ),
    Drill(
        "gateway-killed", "kill -9 of the only gateway", kill_gateway, alerts=("GatewayDown",),
        impact=Impact(lost=20, failed=100, refused=None), seconds=3.0,  # refused: before it knows its servers again
    ),
    Drill(
        "gateway-restarted", "SIGTERM of the gateway: it finishes its streams and is started again", restart_gateway,
        impact=Impact(failed=100, refused=None), seconds=3.0,
    ),
    Drill(
        "config-broken", "an unknown section is written into the gateway's file", break_config,
        alerts=("ConfigReloadFailed",),
        look=("lmworks gateway $FLEET/gateway.toml --port 0",),
        act=("cp $FLEET/gateway.toml.good $FLEET/gateway.toml",),
    ),
    Drill(
        "retry-storm", "24 requests a second more, from clients that ask again at once when they are refused", storm,
        alerts=("QueueSaturated",), withdraw=end_storm, tenants=(*FEW, STORM),
        impact=Impact(refused=None, failed=0), seconds=8.0,
        look=(STATUS, SERVERS, "curl -s $GATEWAY/metrics | grep gateway_requests_total"), shape=SMALL,
        tokens=(48, 64),
    ),
    Drill(
        "servers-full", "24 requests a second more, for which the queues of the servers are too short", storm,
        alerts=("RetriesHigh",), withdraw=end_storm, tenants=(*FEW, replace(STORM, retries=0)), seconds=10.0,
        impact=Impact(refused=None), look=("curl -s $GATEWAY/metrics | grep gateway_try_failures_total", SERVERS),
        shape=Shape(SMALL.servers, SMALL.options, {"queue": 4, "queue_seconds": 0.0}, SMALL.gateway),
    ),
    Drill(
        "cache-too-small", "24 requests a second more with long answers, for which the KV caches are too small",
        flood_cache, alerts=("KVCacheSaturated", "PreemptionsHigh"), withdraw=end_cache_flood, tenants=(*FEW, LONG),
        tokens=(200, 300), impact=Impact(refused=None), recovers=90.0,
        look=(
            SERVERS, "curl -s $SERVER_URL/metrics | grep kv_cache_usage_perc",
            "curl -s $SERVER_URL/metrics | grep num_preemptions_total",
        ),
        shape=Shape(
            options=("engine.blocks=192", "engine.max_seqs=64"), limits={"queue": 256, "queue_seconds": 0.0},
            gateway={"timeouts": SMALL.gateway["timeouts"] | {"idle": 60.0}},  # a preempted stream stands still
        ),
    ),
    Drill(
        "prompts-changed", "each request has a cache_salt of its own: no prefix of a prompt is found", salt_prompts,
        alerts=("PrefixCacheCollapse",), within=60.0, withdraw=end_salt, steady=30.0, prompt_bytes=160,
        look=("curl -s $SERVER_URL/metrics | grep prefix_cache_hits_total", SERVERS),
    ),
    Drill(
        "wrong-keys", "ten requests a second with keys that do not exist, from many addresses", try_keys,
        alerts=("AuthenticationFailures",), withdraw=end_tries, seconds=8.0,
        look=(
            "grep invalid_api_key $FLEET/logs/gateway.log | tail -n 3",
            "lmworks gateway audit --config $FLEET/gateway.toml",
            "lmworks gateway keys list --config $FLEET/gateway.toml",
        ),
        shape=Shape(tenants=("blue", "green")),
    ),
    Drill(
        "tenant-flood", "a tenant sends twenty times its limit of a request a second", flood,
        alerts=("TenantThrottled",), prepare=limit_flood, withdraw=end_flood, tenants=(*TENANTS, FLOOD),
        impact=Impact(refused=0, within_slo={"blue": 0.95, "green": 0.95}), seconds=8.0,
        look=("lmworks gateway usage --config $FLEET/gateway.toml --by tenant,outcome",),
        shape=Shape(tenants=("blue", "green", "flood")),
    ),
    Drill(
        "store-down", "kill -9 of the Redis that counts the rates of tenants", kill_redis, alerts=("StoreDown",),
        act=("redis-server $FLEET/redis.conf",), shape=Shape(tenants=("blue", "green"), redis=True),
    ),
    Drill(
        "disk-full", "the disk of the usage journal is full", fill, alerts=("StoreDown",),
        impact=Impact(failed=0, refused=None), look=("df $FLEET/disk",), act=("rm $FLEET/disk/filler",),
        shape=Shape(tenants=("blue", "green"), small_disk=True),
    ),
    Drill(
        "certificate-expired", "the certificate of a server ends, and its connections do", expire_certificate,
        alerts=("CertificateExpired", "ServerDown"),
        look=(STATUS, SERVERS, "openssl x509 -in $FLEET/$SERVER.pem -noout -enddate"),
        act=("openssl x509 -req -days 30 -in $FLEET/$SERVER.csr -CA $FLEET/ca.pem -CAkey $FLEET/ca.key -CAcreateserial "
             "-copy_extensions copy -out $FLEET/$SERVER.pem",),
        shape=Shape(tls=True),
    ),
    Drill(
        "clock-skew", "the wall clock of a server is two hours ahead", skew_clock, alerts=("ClockSkew",),
        withdraw=set_clock, look=("curl -sI $SERVER_URL/health",), shape=Shape(clock=True),
    ),
    Drill(
        "metrics-down", "Prometheus cannot reach a server's metrics", cut_metrics, alerts=("MetricsMissing",),
        withdraw=mend_network, look=("curl -s -o /dev/null -w %{http_code} $SERVER_URL/metrics",), scrape_proxied=True,
    ),
    Drill(
        "file-descriptors-low", "a client leaves 300 connections open, and the gateway may open few more",
        exhaust_descriptors, alerts=("FileDescriptorsLow",), check=descriptors_left,
        look=("prlimit --nofile --pid $GATEWAY_PID", "ls /proc/$GATEWAY_PID/fd | wc -l"),
        act=("prlimit --nofile=$(prlimit --nofile --output HARD --noheadings --raw --pid $GATEWAY_PID): "
             "--pid $GATEWAY_PID",),
    ),
    Drill(
        "adapter-nonsense", "a new version of an adapter is loaded whose weights are noise", replace_adapter,
        alerts=("QualityDrift",), tenants=(*TENANTS, PINK), prepare=serve_adapter, check=was_nonsense,
        look=("curl -s $SERVER_URL/v1/models", "curl -s $GATEWAY/metrics | grep gateway_quality_score"),
        act=tuple(
            f"curl -sf{again} ${name}/v1/{action}_lora_adapter -H 'content-type: application/json' -d '{body}'"
            for name in ("SERVER_URL", "OTHER_URL") for action, again, body in (
                ("unload", "", '{"lora_name": "helper"}'),
                ("load", " --retry 9 --retry-all-errors",
                 '{"lora_name": "helper", "lora_path": "\'$FLEET\'/adapters/good"}'),
            )
        ),
        impact=Impact(spoilt=("pink",), within_slo={"blue": 0.95, "green": 0.95}),
        shape=Shape(options=("--adapter-root", "/")),
    ),
    Drill(
        "cache-poisoned", "blocks of the KV cache on a server's disk are damaged, and the server starts again",
        poison_cache, alerts=("KVCacheCorrupt", "ServerDown"), within=60.0, prompt_bytes=80,
        look=(STATUS, "curl -s $SERVER_URL/metrics | grep kv_tier"),
        act=("curl -sf -X POST $SERVER_URL/reset_prefix_cache",),
        shape=Shape(
            options=("engine.kv_host_gib=0.05", "engine.kv_disk={fleet}/kv-{name}", "engine.kv_disk_gib=0.5")
        ),
    ),
    Drill(
        "rollout-wrong", "a new version whose answers are others gets a tenth of the requests", roll_out_bad,
        alerts=("RolloutRolledBack",), prepare=prepare_bad_version, check=only_its_own, clear=end_candidate,
        impact=Impact(wrong=12), look=(ROLLOUTS, "curl -s $GATEWAY/metrics | grep gateway_rollout"), seconds=10.0,
    ),
    Drill(
        "rollout-slow", "a new version that gets a tenth of its core is sent half of the requests", roll_out_slow,
        alerts=("RolloutRolledBack",), prepare=prepare_slow_version, check=rolled_back, clear=end_candidate,
        look=(ROLLOUTS, "curl -s $GATEWAY/metrics | grep gateway_rollout"), seconds=10.0,
    ),
)  # fmt: skip
