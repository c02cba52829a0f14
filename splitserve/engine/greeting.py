"""What a launched rank and its node say to each other first, on each of their connections.

Nothing is unpickled from a process that has not said its line; beyond that, whoever can reach
these ports is trusted, as by torch.distributed.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass

import splitserve
from splitserve.core.launch import Launch

CHANNELS = ("steps", "pulls", "death")
"""A rank's connections, in the order in which they are made."""

JOIN_TIMEOUT_S = 300.0
"""How long a node and its ranks look for one another."""

JOIN_RETRY_S = 0.2
"""Pause before either looks again."""

GREETING_TIMEOUT_S = 10.0
"""How long the other side may take for its line."""

MAX_GREETING_BYTES = 1024
WELCOME = "welcome"

_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""A host that is gone without a word is noticed within 20 s."""


@dataclass(frozen=True)
class Greeting:
    """What a rank says first on each of its connections."""

    version: str
    job: str
    num_ranks: int
    rank: int
    pid: int
    channel: str

    @classmethod
    def of(cls, launch: Launch, channel: str) -> "Greeting":
        """This process's."""
        return cls(
            splitserve.__version__,
            launch.job,
            launch.num_ranks,
            launch.rank,
            os.getpid(),
            channel,
        )

    @classmethod
    def parse(cls, line: bytes) -> "Greeting":
        """Reads one; raises `ValueError` if it is none."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("not a greeting")
        if {name: type(value) for name, value in values.items()} != cls.__annotations__:
            raise ValueError("not a greeting")
        return cls(**values)

    def encode(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel notice when the other host is gone."""
    for option in _SOCKET_OPTIONS:
        connection.setsockopt(*option)
