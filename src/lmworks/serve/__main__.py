"""`python -m lmworks.serve engine|worker FD`: an engine or worker process; the API has the other end of the socket."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

from ..record.parent_death import kill_with_parent
from .channel import SocketChannel

if __name__ == "__main__":
    kill_with_parent()  # one that is stopped does not see its socket close
    # Service managers signal every process of a group: this one ends when the API closes its socket.
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    role, descriptor = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    code = 0
    if role == "engine":
        from .engine_loop import serve

        code = serve(SocketChannel(connection))
    else:
        from . import workers

        with suppress(ConnectionError, StopIteration):
            workers.serve(SocketChannel(connection))
    sys.stderr.flush()
    os._exit(code)  # at once: threads may still be reading
