"""`lmworks kv-store`: blocks of the KV cache that servers share."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from .output import print_json


def kv_store(
    folder: Annotated[Path, typer.Argument(help="Where the blocks are kept; found again after a restart.")],
    size_gib: Annotated[float, typer.Option(min=0, help="Its size in GiB; the least recently used blocks go first.")],
    listen: Annotated[
        str, typer.Option(help="Address for servers; port 0: any that is free.")
    ] = "tcp://127.0.0.1:7070",
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON, for programs.")] = False,
) -> None:
    """Keep blocks of the KV cache for servers, over TCP.

    Servers use it with engine.kv_shared = ADDRESS. It and they take a secret from LMWORKS_KV_SECRET, which is needed
    where it listens for other machines. Blocks are not encrypted on their way (docs/kv-cache.md).

    \b
    Examples:
      lmworks kv-store /var/cache/kv --size-gib 500
      lmworks serve exported/demo engine.kv_host_gib=16 engine.kv_shared=tcp://127.0.0.1:7070
    """
    from ..engine.kv_tiers.disk import DiskStore
    from ..engine.kv_tiers.socket_store import BlockServer

    store = DiskStore(folder, int(size_gib * 2**30))
    server = BlockServer(listen, store)
    found = {"address": server.address, "blocks": len(store.sizes), "bytes": store.used}
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{server.address} ({found['blocks']:,} blocks, {store.used / 2**30:,.2f} GiB)")
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    server.server_close()
    store.close()
