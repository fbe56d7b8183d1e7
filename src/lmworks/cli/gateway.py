"""`lmworks gateway`: one address in front of many servers."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ..spec.errors import LMWorksError
from . import gateway_tenants
from .groups import DefaultCommandGroup


class ConfigOrCommand(DefaultCommandGroup):
    """`lmworks gateway CONFIG …` is `lmworks gateway run CONFIG …`."""

    default_command = "run"


app = typer.Typer(
    cls=ConfigOrCommand,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Route requests to many servers; keys and usage of tenants.",
)
app.add_typer(gateway_tenants.keys, name="keys")
app.add_typer(gateway_tenants.tenants, name="tenants")
app.command()(gateway_tenants.usage)
app.command()(gateway_tenants.audit)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of pools, models and rules.")],
    host: Annotated[str | None, typer.Option(help="Where to listen, instead of listen.host.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Instead of listen.port; 0: any that is free.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the port.")] = 1,
) -> None:
    """Route requests to many OpenAI-compatible servers.

    The file names pools of servers (ours, vLLM, SGLang, llama.cpp, cloud APIs), the models that clients ask for, and
    how a server is chosen. It is read again when it changes (docs/gateway.md).

    \b
    Examples:
      lmworks gateway gateway.toml
      lmworks gateway gateway.toml --host 0.0.0.0 --port 8080
      lmworks gateway gateway.toml --workers 4
    """
    try:
        import uvloop

        from ..gateway.gateway import Gateway, GatewaySettings
        from ..gateway.workers import Supervisor, check_workers
        from ..observability.tracing import tracing_from_environment
        from ..serve.server import bind_socket
        from ..serve.telemetry import log_as_json
    except ImportError as error:
        raise LMWorksError(f"the gateway needs {error.name}: pip install 'lmworks[gateway]'") from None
    settings = GatewaySettings(config)
    check_workers(settings.config, workers)
    listen, tenants = settings.config.listen, settings.config.tenants
    with ExitStack() as sockets:
        addresses = [(listen.host if host is None else host, listen.port if port is None else port)]
        if tenants.on and tenants.admin_port:
            addresses.append((tenants.admin_host, tenants.admin_port))
        bound = [sockets.enter_context(bind_socket(*one)) for one in addresses]
        log_as_json()
        address, number = bound[0].getsockname()[:2]
        typer.echo(f"{'http' if listen.tls is None else 'https'}://{address}:{number}", err=True)
        if workers > 1:
            asyncio.run(Supervisor(config, workers, bound).run())
            return
        tracing = tracing_from_environment("lmworks-gateway")

        async def main() -> None:
            await Gateway(settings, tracing).run(bound)

        uvloop.run(main())
        if tracing is not None:
            tracing.close()
