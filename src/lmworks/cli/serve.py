"""`lmworks serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..serve.parsers.names import NONE, REASONING_PARSER_NAMES, TOOL_PARSER_NAMES, ParserNames, check_pair
from ..spec import EngineSpec
from ..spec.errors import LMWorksError, SpecError, did_you_mean
from ..spec.presets import PRESETS
from ..weight_prefetch import prefetch_weights
from . import options
from .generate import engine_options, parse_adapters
from .loading import loading

if TYPE_CHECKING:
    from ..serve.channel import LoadedEngine
    from ..serve.serving import Serving

KEY, UPSTREAM_KEY = "LMWORKS_API_KEY", "LMWORKS_UPSTREAM_KEY"
REGISTER_SECRET = "LMWORKS_REGISTER_SECRET"
TOOLS = ", ".join((*TOOL_PARSER_NAMES, NONE))
REASONING = ", ".join((*REASONING_PARSER_NAMES, NONE))
ALL_INTERFACES = ("0.0.0.0", "::")


def serve(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL|NAME=MODEL]... [engine.KEY=VALUE]...",
            help="Run folders, Hugging Face folders or presets, each with its own name; changes to the engine.",
            autocompletion=options.models_and_engine,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0: everywhere (then with keys).")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of keys and limits, read again when it changes (docs/serving.md).")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"File of keys that clients must show, one a line; -: standard input. Or set {KEY}."),
    ] = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(help=f"Another OpenAI-compatible server, e.g. http://host:8000/v1 (its key: {UPSTREAM_KEY})."),
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter of the (only) model.")
    ] = None,
    chat_template: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE",
            help="A Jinja chat template (of the model NAME) to use instead of the model's own; a run has none.",
        ),
    ] = None,
    tool_parser: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PARSER", help=f"How (model NAME) writes calls: {TOOLS}; default: its template."),
    ] = None,
    reasoning_parser: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PARSER", help=f"How it writes reasoning: {REASONING}; default: its template."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM): serve HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Authorities (PEM): clients must show a certificate of theirs (mutual TLS).")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="A site whose pages may call this API; off by default.")
    ] = None,
    api_processes: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that speak HTTP, where one does not keep up with the engine.")
    ] = 1,
    pooling: Annotated[
        Literal["auto", "last", "mean"],
        typer.Option(help="Of /v1/embeddings: the last token's state or the mean. auto: as the model's folder says."),
    ] = "auto",
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(help="auto: requests that say nothing are sampled as the model's generation_config.json says."),
    ] = "auto",
    adapter_root: Annotated[
        Path | None, typer.Option(help="Folder whose adapters POST /v1/load_lora_adapter may load; off by default.")
    ] = None,
    batch_dir: Annotated[
        Path | None, typer.Option(help="Folder of /v1/files and /v1/batches, kept over restarts; off by default.")
    ] = None,
    register: Annotated[
        list[str] | None,
        typer.Option(metavar="GATEWAY", help="Register at this gateway, http://host:8080; may be repeated."),
    ] = None,
    register_pool: Annotated[str, typer.Option(help="The gateway's pool to register in.")] = "local",
    register_as: Annotated[
        str | None, typer.Option(metavar="URL", help="This server's address for gateways; default: --host and --port.")
    ] = None,
    profile_dir: Annotated[
        Path | None, typer.Option(help="Where POST /start_profile and /stop_profile write traces; off by default.")
    ] = None,
    drain_seconds: Annotated[float, typer.Option(min=0, help="Time to finish requests after SIGTERM.")] = 30.0,
    step: Annotated[int | None, typer.Option(help="Of a run: the checkpoint of this step, not the newest.")] = None,
    seed: Annotated[int, typer.Option(help="Of requests that bring none, and of a preset's random weights.")] = 0,
) -> None:
    """Serve models over OpenAI's API: keys, limits, metrics, a page.

    \b
    Examples:
      lmworks serve runs/demo
      lmworks serve chat=exported/demo engine.dtype=bf16 --host 0.0.0.0 --config serve.toml
      lmworks serve runs/mine --chat-template chatml.jinja
      lmworks serve --upstream http://127.0.0.1:8001/v1
    \b
    Then:
      curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"model": "demo", "prompt": "def add(a, b):", "max_tokens": 32}'
    """
    names, options = parse_sources(sources or [])
    if not names and not upstream:
        raise SpecError("nothing to serve: name a run folder, a Hugging Face folder, or --upstream URL")
    if adapter and len(names) != 1:
        raise SpecError("--adapter is of one model: serve one")
    if (tls_cert is None) != (tls_key is None):
        raise SpecError("--tls-cert and --tls-key go together")
    if tls_client_ca is not None and tls_cert is None:
        raise SpecError("--tls-client-ca needs --tls-cert and --tls-key")
    if batch_dir is not None and api_processes > 1:
        raise SpecError("--batch-dir is of one process: leave out --api-processes, or serve batches by another server")
    if register and register_as is None and host in ALL_INTERFACES:
        raise SpecError(f"--register: gateways cannot reach {host}: give --register-as http://ADDRESS:{port}/v1")
    check_files(config, tls_cert, tls_key, tls_client_ca)
    templates = read_templates(chat_template or [], names)
    parsers = read_parsers(tool_parser or [], reasoning_parser or [], names)
    import_server()
    from ..observability.tracing import tracing_from_environment
    from ..serve.app import make_app
    from ..serve.batches.service import BatchService
    from ..serve.engine_host import APIProcessConfig, EngineHost
    from ..serve.keys import read_secrets
    from ..serve.middleware import loopback
    from ..serve.registration import Registration
    from ..serve.server import NOTICE_S, bind_socket, make_server
    from ..serve.telemetry import log_as_json
    from ..serve.tls import TLSFiles

    keys = [*(read_secrets(api_key_file) if api_key_file else ()), *filter(None, [os.environ.get(KEY)])]
    upstream_urls = [] if api_processes > 1 else upstream or []  # several API processes have their own
    serving = make_serving(names, options, step, seed, adapter or [], templates, parsers, upstream_urls, config, keys)
    serving.profile_dir, serving.adapter_root = profile_dir, adapter_root
    serving.batches = BatchService(batch_dir) if batch_dir is not None else None
    serving.generation_config = generation_config == "auto"
    serving.pooling = None if pooling == "auto" else pooling
    if host in ALL_INTERFACES and not serving.settings.current().keys:
        typer.echo(
            "lmworks: warning: anyone who can reach this machine can use these models: no keys are set", err=True
        )
    tracing = tracing_from_environment("lmworks")
    with bind_socket(host, port) as listening:
        log_as_json()
        scheme = "http" if tls_cert is None else "https"
        address = f"{scheme}://{host}:{listening.getsockname()[1]}"
        typer.echo(f"{address} (models are being loaded)", err=True)
        if register:
            own = register_as or f"{address}/v1"
            serving.registration = Registration(register, own, register_pool, os.environ.get(REGISTER_SECRET))
        for source in names.values():
            typer.echo(loading(source, step), err=True)
        tls = TLSFiles(tls_cert, tls_key, tls_client_ca) if tls_cert is not None else None
        if api_processes > 1:
            process_config = APIProcessConfig(
                processes=api_processes,
                config=config,
                keys=keys,
                upstreams=upstream or [],
                upstream_key=os.environ.get(UPSTREAM_KEY),
                origins=tuple(cors or ()),
                local=loopback(host),
                drain_seconds=drain_seconds,
                tls=tls,
                pooling=serving.pooling,
                profile_dir=profile_dir,
                generation_config=serving.generation_config,
                adapter_root=adapter_root,
            )
            EngineHost(serving, process_config, listening, min(NOTICE_S, drain_seconds)).run()
        else:
            app = make_app(serving, cors or (), tracing, loopback(host))
            make_server(app, serving, drain_seconds, tls).run([listening])
    if tracing is not None:
        tracing.close()


def import_server() -> None:
    try:
        import fastapi  # noqa: F401
        import httpx  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise LMWorksError(f"the server needs {error.name}: pip install 'lmworks[serve]'") from None


def check_files(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.is_file():
            raise SpecError(f"{path}: there is no such file")


def parse_sources(given: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Sources by model name, and engine options."""
    overrides = [one for one in given if one.startswith("engine.") and "=" in one]
    names: dict[str, str] = {}
    for one in given:
        if one in overrides:
            continue
        name, _, source = one.partition("=") if "=" in one and not Path(one).exists() else ("", "", one)
        if not Path(source).exists() and source not in PRESETS:
            raise SpecError(f"{source}: there is no such folder{did_you_mean(source, PRESETS)}")
        name = name or (Path(source).resolve().name if Path(source).exists() else source)
        if name in names:
            raise SpecError(f"two models are called {name!r}: give one another name, NAME={source}")
        names[name] = source
    return names, engine_options(overrides)


def read_templates(given: list[str], names: dict[str, str]) -> dict[str, str]:
    """Chat templates by model name, compiled once so that errors are reported at startup."""
    from ..data.chat_template import compile_template

    found: dict[str, str] = {}
    for one in given:
        name, _, file = one.partition("=") if "=" in one and not Path(one).exists() else ("", "", one)
        if not name and len(names) != 1:
            raise SpecError(f"--chat-template {one}: write NAME=FILE, with one of the models {', '.join(names)}")
        name = name or next(iter(names))
        if name not in names:
            raise SpecError(f"--chat-template {one}: no model is called {name!r}{did_you_mean(name, names)}")
        if name in found:
            raise SpecError(f"--chat-template {one}: the model {name!r} has one already")
        try:
            found[name] = Path(file).read_text(encoding="utf-8")
            compile_template(found[name], {})
        except (OSError, ValueError) as error:
            raise SpecError(
                f"--chat-template {one}: cannot be read ({getattr(error, 'strerror', None) or error})"
            ) from None
        except SpecError as error:
            raise SpecError(f"--chat-template {one}: {error}") from None
    return found


def read_parsers(tools: list[str], reasoning: list[str], names: dict[str, str]) -> dict[str, ParserNames]:
    """By model name."""
    tool = by_model("--tool-parser", tools, TOOL_PARSER_NAMES, names)
    thinking = by_model("--reasoning-parser", reasoning, REASONING_PARSER_NAMES, names)
    found = {name: ParserNames(tool.get(name), thinking.get(name)) for name in names}
    for one in found.values():
        check_pair(one)
    return found


def by_model(option: str, given: list[str], known: tuple[str, ...], names: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        name, _, parser = one.rpartition("=")
        if not name and len(names) != 1:
            raise SpecError(f"{option} {one}: write NAME={one}, with one of the models {', '.join(names)}")
        name = name or next(iter(names))
        if name not in names:
            raise SpecError(f"{option} {one}: no model is called {name!r}{did_you_mean(name, names)}")
        if name in found:
            raise SpecError(f"{option} {one}: the model {name!r} has one already")
        if parser not in (*known, NONE):
            raise SpecError(f"{option} {parser}: there are {', '.join((*known, NONE))}{did_you_mean(parser, known)}")
        found[name] = parser
    return found


def make_serving(
    names: dict[str, str],
    options: dict[str, Any],
    step: int | None,
    seed: int,
    adapters: list[str],
    templates: dict[str, str],
    parsers: dict[str, ParserNames],
    upstreams: list[str],
    config: Path | None,
    keys: list[str],
) -> Serving:
    from ..serve.engine_process import EngineProcess, StallTimeouts
    from ..serve.keys import Settings
    from ..serve.serving import LocalModel, Serving, Upstream

    EngineSpec.from_dict(options)  # validated here, not by a process that fails
    settings = Settings(config, keys)
    limits = settings.current().limits
    stall_timeouts = StallTimeouts(limits.stuck_seconds, limits.kill_seconds)
    folders = parse_adapters(adapters)
    models = [
        LocalModel(
            EngineProcess(
                name,
                partial(load_engine_process, source, options, step, seed, folders, templates.get(name), parsers[name]),
                stall_timeouts,
            )
        )
        for name, source in names.items()
    ]
    return Serving(settings, models, [Upstream(url, os.environ.get(UPSTREAM_KEY)) for url in upstreams])


def load_engine_process(
    source: str,
    options: dict[str, Any],
    step: int | None,
    seed: int,
    adapters: dict[str, str],
    chat_template: str | None = None,
    parsers: ParserNames = ParserNames(),
) -> LoadedEngine:
    """The factory of EngineProcess: runs in the engine process."""
    prefetch_weights(source)
    from ..data.fim import find_sentinels
    from ..loading import adds_special_tokens, is_preset, load_engine, trained_fim
    from ..serve.channel import LoadedEngine

    _, engine = load_engine(source, EngineSpec.from_dict(options), step, seed)
    for name, where in adapters.items():
        engine.add_adapter(name, Path(where))
    folder = None if is_preset(source) else Path(source).resolve()
    sentinels = find_sentinels(engine.tokenizer, trained_fim(source)) if engine.tokenizer is not None else None
    return LoadedEngine(engine, folder, adds_special_tokens(folder), chat_template, sentinels, parsers)
