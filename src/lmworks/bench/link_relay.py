"""Delay and loss without netem: two TUN devices in two network namespaces, and a process that carries their packets.

A packet that one device sends is written to the other `delay` seconds later, or dropped. Order is kept.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from ..spec import LMWorksError

MTU = 9000  # jumbo frames, as between the machines of a cluster
TUNSETIFF = 0x400454CA  # <linux/if_tun.h>
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29  # <sys/prctl.h>
EARLY_S = 2e-5  # a packet this near to its time is sent: sleeping takes longer


class Relay:
    """Started with the devices in place; `ends`: (namespace, device) of each."""

    def __init__(self, ends: Sequence[tuple[str, str]], delay_s: float, loss: float) -> None:
        ready, started = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ready)
            try:
                carry(ends, delay_s, loss, started)
            except BaseException as error:
                os.write(started, str(error).encode())
            os._exit(0)
        os.close(started)
        said = os.read(ready, 1000)
        os.close(ready)
        if said != b"ok":
            self.close()
            raise LMWorksError(f"this kernel or container refuses a shaped link: {said.decode()}")

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def open_tun(namespace: str, device: str) -> int:
    from .shaped_link import enter_namespace

    enter_namespace(namespace)
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return handle


def carry(ends: Sequence[tuple[str, str]], delay_s: float, loss: float, started: int) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_TIMERSLACK, 1000)  # ns
    with suppress(OSError):  # on a busy machine packets are not late for that; it needs root, as TUN does
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    first, second = (open_tun(namespace, device) for namespace, device in ends)
    to = {first: second, second: first}
    os.write(started, b"ok")
    os.close(started)
    poll, chance = select.poll(), random.Random(0)
    for handle in to:
        poll.register(handle, select.POLLIN)
    waiting: deque[tuple[float, int, bytes]] = deque()  # (when, to, packet): the delay is one, so is the order
    while True:
        left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        ready = poll.poll(None if left is None else 1e3 * left) if left is None or left > EARLY_S else poll.poll(0)
        now = time.monotonic()
        for handle, _ in ready:
            while True:
                try:
                    packet = os.read(handle, 65536)
                except BlockingIOError:
                    break
                except OSError:  # the device is not up yet
                    time.sleep(0.001)
                    break
                if not loss or chance.random() >= loss:
                    waiting.append((now + delay_s, to[handle], packet))
        while waiting and waiting[0][0] <= time.monotonic() + EARLY_S:
            _, target, packet = waiting.popleft()
            try:
                os.write(target, packet)
            except OSError:  # its queue is full, or it is down: a packet is lost
                continue
