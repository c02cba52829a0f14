"""Ranks that a launcher starts, on this host or on others: how they and their node find each other.

Every process is started with the node's own command. Rank 0 is the node; it listens, and starts
its own worker as ever. Every other process becomes a worker: it dials rank 0 once for steps, once
for pulls and once as its death pipe, says a line on each about who it is, hears a line, and goes
on as a worker that was born with those three. Nothing is unpickled from a process that has not
said that line; beyond that, whoever can reach these ports is trusted, as by torch.distributed.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass
from typing import NoReturn

import splitserve
from splitserve.core.config import NodeConfig
from splitserve.core.errors import FailedPreconditionError, UnavailableError
from splitserve.core.launch import Launch
from splitserve.engine.spawn import signals_held_back, worker_command, worker_environment
from splitserve.kv.memory import sweep_stale

log = logging.getLogger(__name__)

CHANNELS = ("steps", "pulls", "death")

JOIN_TIMEOUT_S = 300.0
"""How long a node and its ranks look for one another."""

JOIN_RETRY_S = 0.2
"""Pause between a rank's attempts to reach its node."""

GREETING_TIMEOUT_S = 10.0
"""How long the other side may take for its line."""

MAX_GREETING_BYTES = 1024
KILL_GRACE_S = 1.0
"""How long a rank that is told to end may take before it is given up."""

_WELCOME = "welcome"
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
class _Greeting:
    """What a rank says first on each of its connections."""

    version: str
    job: str
    num_ranks: int
    rank: int
    pid: int
    channel: str

    @classmethod
    def of(cls, launch: Launch, channel: str) -> "_Greeting":
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
    def parse(cls, line: bytes) -> "_Greeting":
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


class LaunchedRank:
    """A `RankProcess` that somebody else starts; the node knows it by its connections.

    Attributes:
        ended: How it ended.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.name = "a worker process"
        self.joined: asyncio.Future[None] = loop.create_future()
        self._sockets: dict[str, socket.socket] = {}

    def has(self, channel: str) -> bool:
        """Whether that one of its connections stands."""
        return channel in self._sockets

    def add(self, channel: str, connection: socket.socket, pid: int) -> None:
        """Takes one of its connections; with the last of them it has joined."""
        self._sockets[channel] = connection
        if len(self._sockets) == len(CHANNELS):
            self.name = f"worker process {pid} on {connection.getpeername()[0]}"
            asyncio.get_running_loop().add_reader(self._sockets["death"], self._on_death)
            self.joined.set_result(None)

    async def connect(self) -> tuple[socket.socket, socket.socket]:
        """Its connections, once it has joined."""
        await asyncio.shield(self.joined)
        return self._sockets["steps"], self._sockets["pulls"]

    def kill(self) -> None:
        """Tells it to end; one that does not answer is cut off, and taken for ended."""
        if self.ended.done():
            return
        if not self.joined.done():
            self.ended.set_result("never joined")
            return
        with contextlib.suppress(OSError):
            self._sockets["death"].shutdown(socket.SHUT_WR)
        asyncio.get_running_loop().call_later(KILL_GRACE_S, self._cut_off, "did not answer")

    def close(self) -> None:
        """Closes its connections."""
        for connection in self._sockets.values():
            connection.close()

    def _on_death(self) -> None:
        try:
            self._sockets["death"].recv(1)
        except OSError as error:
            self._cut_off(f"cannot be reached any more ({error.strerror})")
        else:
            self._end("has gone")

    def _cut_off(self, how: str) -> None:
        if not self.ended.done():
            for connection in self._sockets.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._end(how)

    def _end(self, how: str) -> None:
        asyncio.get_running_loop().remove_reader(self._sockets["death"])
        self.ended.set_result(how)


class RankListener:
    """Where the ranks of a node join it: a context that listens.

    Args:
        launch: What the launcher says to this process, rank 0.

    Attributes:
        ranks: The others.

    Raises:
        UnavailableError: The address cannot be listened on.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._listener = listen(launch.host, launch.port)
        self._listener.setblocking(False)
        self.ranks = {rank: LaunchedRank() for rank in range(1, launch.num_ranks)}

    async def __aenter__(self) -> "RankListener":
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()

    async def wait_joined(self) -> None:
        """Waits until all ranks have joined.

        Raises:
            UnavailableError: Some have not in time.
        """
        log.info("waiting for ranks", extra={"ranks": len(self.ranks), "at": self._launch.address})
        await asyncio.wait([rank.joined for rank in self.ranks.values()], timeout=JOIN_TIMEOUT_S)
        missing = [str(number) for number, rank in self.ranks.items() if not rank.joined.done()]
        if missing:
            raise UnavailableError(
                f"ranks {', '.join(missing)} of {self._launch.num_ranks} have not joined at "
                f"{self._launch.address} within {JOIN_TIMEOUT_S:g} s"
            )

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as guests:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                guests.create_task(self._receive(connection))

    async def _receive(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        kept = False
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                line = b""
                while not line.endswith(b"\n") and len(line) < MAX_GREETING_BYTES:
                    if not (more := await loop.sock_recv(connection, MAX_GREETING_BYTES)):
                        break
                    line += more
                greeting = _Greeting.parse(line)
                refusal = self._refusal(greeting)
                await loop.sock_sendall(connection, f"{refusal or _WELCOME}\n".encode())
            if not refusal:
                _keep_alive(connection)
                self.ranks[greeting.rank].add(greeting.channel, connection, greeting.pid)
                kept = True
        except (OSError, TimeoutError, ValueError, RecursionError) as error:
            refusal = str(error)
        finally:
            if not kept:
                connection.close()
        if refusal:
            log.warning("a rank was turned away", extra={"reason": refusal})

    def _refusal(self, greeting: _Greeting) -> str:
        """Why that is none of ours; empty if it is."""
        ours = _Greeting.of(self._launch, greeting.channel)
        for name in ("version", "job", "num_ranks"):
            mine, theirs = getattr(ours, name), getattr(greeting, name)
            if mine != theirs:
                return f"{name}: rank {greeting.rank} has {theirs!r}, its node has {mine!r}"
        if greeting.rank not in self.ranks or greeting.channel not in CHANNELS:
            return f"rank {greeting.rank}: no such rank joins a node"
        if self.ranks[greeting.rank].has(greeting.channel):
            return f"rank {greeting.rank}: it has joined already"
        return ""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UnavailableError: It cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UnavailableError(
            f"MASTER_ADDR: rank 0 cannot listen on {host}:{port} ({error.strerror})"
        ) from error


def take_rank(config: NodeConfig) -> NodeConfig:
    """Returns on the rank that is the node; any other becomes its worker and does not return.

    Raises:
        UnavailableError: The node is not there.
        FailedPreconditionError: It does not want this rank.
    """
    launch = config.engine.launch
    if launch is not None and launch.rank > 0:
        _become_worker(launch, config.engine.threads)
    return config


def _become_worker(launch: Launch, threads: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Nothing to tidy up, and no traceback.
    sweep_stale()
    log.info("joining the node", extra={"rank": launch.rank, "at": launch.address})
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    steps, pulls, death = (_join(launch, channel, deadline) for channel in CHANNELS)
    for fd in (fds := (steps.detach(), pulls.detach(), death.detach())):
        os.set_inheritable(fd, True)
    command = worker_command(launch.rank, fds)
    with signals_held_back():
        os.execve(command[0], command, worker_environment(threads))


def _join(launch: Launch, channel: str, deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection((launch.host, launch.port), GREETING_TIMEOUT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"MASTER_ADDR: no node at {launch.address} within {JOIN_TIMEOUT_S:g} s "
                    f"({error.strerror or error}); rank 0 has to run there"
                ) from error
            time.sleep(JOIN_RETRY_S)
    try:
        connection.sendall(_Greeting.of(launch, channel).encode())
        answer = b""
        # Byte by byte: what follows the line is the worker's.
        while not answer.endswith(b"\n") and (more := connection.recv(1)):
            answer += more
    except OSError as error:
        raise UnavailableError(f"{launch.address} does not answer ({error})") from error
    if (said := answer.decode(errors="replace").strip()) != _WELCOME:
        raise FailedPreconditionError(said or f"{launch.address} has hung up")
    connection.settimeout(None)
    _keep_alive(connection)
    return connection


def _keep_alive(connection: socket.socket) -> None:
    for option in _SOCKET_OPTIONS:
        connection.setsockopt(*option)
