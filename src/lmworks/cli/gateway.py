"""`lmworks gateway`: one address in front of many servers."""

from __future__ import annotations

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
) -> None:
    """Route requests to many OpenAI-compatible servers.

    The file names pools of servers (ours, vLLM, SGLang, llama.cpp, cloud APIs), the models that clients ask for, and
    how a server is chosen. It is read again when it changes (docs/gateway.md).

    \b
    Examples:
      lmworks gateway gateway.toml
      lmworks gateway gateway.toml --host 0.0.0.0 --port 8080
    """
    try:
        import uvloop

        from ..gateway.gateway import Gateway, GatewaySettings
        from ..observability.tracing import tracing_from_environment
        from ..serve.server import bind_socket
        from ..serve.telemetry import log_as_json
    except ImportError as error:
        raise LMWorksError(f"the gateway needs {error.name}: pip install 'lmworks[gateway]'") from None
    settings, tracing = GatewaySettings(config), tracing_from_environment("lmworks-gateway")
    listen = settings.config.listen
    with bind_socket(listen.host if host is None else host, listen.port if port is None else port) as listening:
        log_as_json()
        address, number = listening.getsockname()[:2]
        typer.echo(f"{'http' if listen.tls is None else 'https'}://{address}:{number}", err=True)

        async def main() -> None:
            await Gateway(settings, tracing).run(listening)

        uvloop.run(main())
        if tracing is not None:
            tracing.close()
