"""A port of the loopback for processes that are told of it before one of them binds it."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below those that Linux gives to connections, of which tests beside this one make hundreds, and to
# whoever asks for port 0: what is free stays so, but for another draw of 1 in 12,000.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """One that nobody listens on."""
    lot = random.SystemRandom()
    while True:
        port = lot.choice(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
