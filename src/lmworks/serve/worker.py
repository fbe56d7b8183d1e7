"""`python -m lmworks.serve.worker FD`: a worker process of the API, which holds the other end of the socket."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

from .channel import SocketChannel
from .workers import serve

if __name__ == "__main__":
    # Service managers signal every process of a group: this one ends when the API closes its socket.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    with suppress(ConnectionError, StopIteration):
        serve(SocketChannel(connection))
    os._exit(0)
