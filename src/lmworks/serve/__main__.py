"""`python -m lmworks.serve FD`: the engine's process. The API starts it, and holds the other end of the socket."""

from __future__ import annotations

import os
import signal
import socket
import sys

from .channel import SocketChannel
from .engine_loop import serve

if __name__ == "__main__":
    # Service managers signal every process of a group: this one ends when the API closes its socket.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    code = serve(SocketChannel(connection))
    sys.stderr.flush()
    os._exit(code)  # at once: threads may still be reading
