"""The drills: what is planted, which alert must fire, what users are promised, and the runbook's commands."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from contextlib import suppress

import httpx

from .incident import TENANTS, Drill, Promise, Stage
from .load import Tenant
from .local_fleet import MODEL, Shape

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
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 1, stage.memory["limit"][1]))


def break_config(stage: Stage) -> None:
    config = stage.fleet.folder / "gateway.toml"
    stage.memory["config"] = config.read_text(encoding="utf-8")
    (stage.fleet.folder / "gateway.toml.good").write_text(stage.memory["config"], encoding="utf-8")
    config.write_text(stage.memory["config"].replace("[health]", "[healthy]"), encoding="utf-8")


# --- load ------------------------------------------------------------------------------------------------


def storm(stage: Stage) -> None:
    """Four times as many requests, and clients that ask again at once."""
    stage.load.rates["storm"] = 12.0


def end_storm(stage: Stage) -> None:
    stage.load.rates["storm"] = 0.0
    stage.note("the clients have gone")


STORM = Tenant("storm", 0.0, retries=3)

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
        promise=Promise(lost=100, failed=100, refused=None), look=(STATUS, SERVERS),
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
        promise=Promise(lost=20, failed=100), seconds=3.0,
    ),
    Drill(
        "gateway-restarted", "SIGTERM of the gateway: it finishes its streams and is started again", restart_gateway,
        promise=Promise(failed=100, refused=None), seconds=3.0,
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
        promise=Promise(refused=None, failed=0), seconds=8.0, shape=Shape(limits={"queue": 4}),
    ),
)  # fmt: skip
