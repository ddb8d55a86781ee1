"""Where the ranks of one host can meet."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(20_000, 32_000)
"""Where a free port is looked for: below those that systems give to outgoing connections, one of which could take it
before rank 0 listens there."""


def find_port(wanted: int = 0) -> int:
    """The wanted TCP port of this host if it is free, any free one without a wish; 0 if there is none."""
    for port in [wanted] if wanted else random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen()
            return port
    return 0
