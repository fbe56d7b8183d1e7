"""The drills: what is planted, which alert must fire, what users may see, and the runbook's commands."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import httpx

from ..spec import LMWorksError
from .incident import TENANTS, Check, Drill, Impact, Stage
from .load import Tenant
from .local_fleet import MODEL, Shape
from .surroundings import fill_disk, redis_pid, write_certificate

STATUS = "lmworks fleet status --folder $FLEET"
RESTART = "lmworks fleet restart $SERVER --folder $FLEET --now"
SERVERS = "curl -s $GATEWAY/gateway/servers"


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
    """It gets a tenth of the time: stopped for 180 ms, goes on for 20."""
    pid, over = stage.fleet.engine(stage.victim), threading.Event()
    stage.memory["over"] = over

    def throttle() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.18)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.02)

    threading.Thread(target=throttle, daemon=True).start()


def end_throttle(stage: Stage) -> None:
    """The process that it slowed is gone; where it is not, it goes on at full speed."""
    stage.memory["over"].set()


def exhaust_memory(stage: Stage) -> None:
    """The engine may have no more memory than it has now (RLIMIT_AS), and gets prompts that need more."""
    pid = stage.fleet.engine(stage.victim)
    resource.prlimit(pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
    long = {"model": MODEL, "prompt": "x = 1\n" * 60, "max_tokens": 8, "temperature": 0}
    with suppress(httpx.HTTPError):
        httpx.post(f"{stage.fleet.server_url(stage.victim)}/v1/completions", json=long, timeout=20, trust_env=False)


def kill_all(stage: Stage) -> None:
    for name in stage.fleet.names:
        stage.fleet.kill(name)


# --- the network between gateway and servers -------------------------------------------------------------


def cut_network(stage: Stage) -> None:
    stage.proxies[0].cut = True


def slow_network(stage: Stage) -> None:
    stage.proxies[0].delay = 0.6


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
    """The gateway may open no more files and sockets than it has."""
    pid = stage.fleet.pid("gateway")
    used = len(os.listdir(f"/proc/{pid}/fd"))
    stage.memory["limit"] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 8, stage.memory["limit"][1]))


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
    """Its time has come: the servers take the new file as they do at every renewal. Connections that are there stay,
    so those of the gateway end."""
    write_certificate(stage.fleet.folder, days=-1)
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


def load_adapter(stage: Stage) -> None:
    """A new version of an adapter, whose weights are noise, on every server."""
    write_noise_adapter(stage.fleet.folder / "adapters" / "helper")
    for name in stage.fleet.names:
        body = {"lora_name": "helper", "lora_path": str(stage.fleet.folder / "adapters" / "helper")}
        found = httpx.post(
            f"{stage.fleet.server_url(name)}/v1/load_lora_adapter", json=body, timeout=30, trust_env=False
        )
        if found.status_code != 200:
            raise LMWorksError(f"the adapter was not loaded: {found.text[:200]}")
    stage.load.rates["pink"] = 1.0


def write_noise_adapter(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    luck, start = np.random.default_rng(0), "base_model.model.model.layers.0.mlp.down_proj.lora"
    ffn, hidden = mlp_shape(folder.parent.parent)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4096}))
    shapes = {"A": (2, ffn), "B": (hidden, 2)}
    tensors = {f"{start}_{which}.weight": luck.normal(size=size).astype("float32") for which, size in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def mlp_shape(folder: Path) -> tuple[int, int]:
    """(ffn, hidden) of the fleet's model."""
    model = tomllib.loads((folder / "fleet.toml").read_text(encoding="utf-8"))["models"][0]["source"]
    found = tomllib.loads((Path(model) / "spec.toml").read_text(encoding="utf-8"))["model"]
    return int(found["ffn"]), int(found["hidden"])


def adapter_gone(stage: Stage) -> list[Check]:
    found = httpx.get(f"{stage.fleet.server_url(stage.victim)}/v1/models", timeout=5, trust_env=False).json()
    names = [one["id"] for one in found["data"]]
    return [Check("the adapter is gone", "helper" not in names, "not listed", ", ".join(names))]


# --- load ------------------------------------------------------------------------------------------------


def storm(stage: Stage) -> None:
    """Four times as many requests, and clients that ask again at once."""
    stage.load.rates["storm"] = 12.0


def end_storm(stage: Stage) -> None:
    stage.load.rates["storm"] = 0.0
    stage.note("the clients have gone")


STORM = Tenant("storm", 0.0, retries=3, limited=True)

FLOOD = Tenant("flood", 0.0, limited=True)
PINK = Tenant("pink", 0.0, model="helper", known=False)


def flood(stage: Stage) -> None:
    stage.load.rates["flood"] = 20.0


def end_flood(stage: Stage) -> None:
    stage.load.rates["flood"] = 0.0
    stage.note("the flood is over")


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
        "engine-out-of-memory", "RLIMIT_AS of the engine, and a prompt that needs more memory", exhaust_memory,
        alerts=("EngineOutOfMemory", "EngineRestarted"),
    ),
    Drill(
        "server-slow", "the engine of a server gets a tenth of its core", slow_engine, alerts=("ServerSlow",),
        act=(RESTART,), withdraw=end_throttle, seconds=10.0,
    ),
    Drill(
        "all-servers-killed", "kill -9 of every server", kill_all, alerts=("PoolDown",),
        impact=Impact(lost=100, failed=100, refused=None), look=(STATUS, SERVERS),
    ),
    Drill(
        "network-partition", "the network between the gateway and a server is cut", cut_network,
        alerts=("ServerDown",), withdraw=mend_network, look=(STATUS, SERVERS), shape=Shape(proxied=True),
    ),
    Drill(
        "network-slow", "600 ms more between the gateway and a server", slow_network,
        alerts=("ServerSlow",), withdraw=mend_network, look=(SERVERS,), shape=Shape(proxied=True), seconds=10.0,
    ),
    Drill(
        "network-resets", "one of twenty packets from and to a server resets its connection", reset_network,
        alerts=("StreamsMigrated",), withdraw=mend_network, look=(SERVERS,), shape=Shape(proxied=True), seconds=10.0,
    ),
    Drill(
        "gateway-killed", "kill -9 of the only gateway", kill_gateway, alerts=("GatewayDown",),
        impact=Impact(lost=20, failed=100), seconds=3.0,
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
        "retry-storm", "four times as many requests, from clients that ask again at once when they are refused", storm,
        alerts=("QueueSaturated",), withdraw=end_storm, tenants=(*TENANTS, STORM),
        impact=Impact(refused=None, failed=0), seconds=8.0, shape=Shape(limits={"queue": 4}),
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
        "certificate-expired", "the certificate of the servers ends, and a server is restarted", expire_certificate,
        alerts=("CertificateExpired", "ServerDown"),
        look=(STATUS, SERVERS, "openssl x509 -in $FLEET/server.pem -noout -enddate"),
        act=("openssl x509 -req -days 30 -in $FLEET/server.csr -signkey $FLEET/server.key -copy_extensions copy "
             "-out $FLEET/server.pem",),
        shape=Shape(tls=True), recovers=90.0,
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
        "file-descriptors-low", "the gateway may open no more files and sockets than it nearly has",
        exhaust_descriptors, alerts=("FileDescriptorsLow",), look=("prlimit --nofile --pid $GATEWAY_PID",),
        act=("prlimit --nofile=65536:65536 --pid $GATEWAY_PID",),
    ),
    Drill(
        "adapter-nonsense", "an adapter is loaded whose weights are noise", load_adapter, alerts=("QualityDrift",),
        tenants=(*TENANTS, PINK), check=adapter_gone, look=("curl -s $SERVER_URL/v1/models",),
        act=tuple(
            f"curl -sf ${name}/v1/unload_lora_adapter -H 'content-type: application/json' "
            "-d '{\"lora_name\": \"helper\"}'" for name in ("SERVER_URL", "OTHER_URL")
        ),
        impact=Impact(failed=100), shape=Shape(options=("--adapter-root", "/")),
    ),
)  # fmt: skip
