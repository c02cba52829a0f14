"""Ranks that a launcher starts, on this host or on others: the node's end.

Every process is started with the node's own command. Rank 0 is the node: it listens until all
others have joined (`splitserve.engine.join`), and starts its own worker as ever.
"""

import asyncio
import contextlib
import logging
import os
import socket

from splitserve.core.errors import UnavailableError
from splitserve.core.launch import Launch
from splitserve.engine.greeting import (
    CHANNELS,
    GREETING_TIMEOUT_S,
    JOIN_RETRY_S,
    JOIN_TIMEOUT_S,
    MAX_GREETING_BYTES,
    WELCOME,
    Greeting,
    keep_alive,
)

log = logging.getLogger(__name__)

KILL_GRACE_S = 1.0
"""How long a rank that is told to end may take before it is given up."""


class LaunchedRank:
    """A `RankProcess` that somebody else starts; the node knows it by its connections.

    Attributes:
        ended: How it ended.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.name = "a worker process"
        self._pid = 0
        self._connected = False
        self._sockets: dict[str, socket.socket] = {}

    @property
    def joined(self) -> bool:
        """Whether all its connections stand."""
        self._forget_if_gone()
        return len(self._sockets) == len(CHANNELS)

    def refusal(self, channel: str, pid: int) -> str:
        """Why a process's connection is not taken; empty if it is. One that is gone makes room."""
        if self.joined:
            return "it has joined already"
        if self._sockets and pid != self._pid:
            return f"process {self._pid} is joining as it, not {pid}"
        if channel != (wanted := CHANNELS[len(self._sockets)]):
            return f"{channel!r}: its next connection is {wanted!r}"
        return ""

    def add(self, channel: str, connection: socket.socket, pid: int) -> None:
        """Takes one of its connections; with the last of them it has joined."""
        self.name = f"worker process {pid} on {connection.getpeername()[0]}"
        self._pid = pid
        self._sockets[channel] = connection

    async def connect(self) -> tuple[socket.socket, socket.socket]:
        """Its connections; it has joined."""
        self._connected = True
        asyncio.get_running_loop().add_reader(self._sockets["death"], self._on_death)
        return self._sockets["steps"], self._sockets["pulls"]

    def kill(self) -> None:
        """Tells it to end; one that does not answer is cut off, and taken for ended."""
        if self.ended.done():
            return
        if not self._connected:  # Once its connections are closed, it ends.
            self.ended.set_result("was not started")
            return
        with contextlib.suppress(OSError):
            self._sockets["death"].shutdown(socket.SHUT_WR)
        asyncio.get_running_loop().call_later(KILL_GRACE_S, self._cut_off, "did not answer")

    def close(self) -> None:
        """Closes its connections."""
        for connection in self._sockets.values():
            connection.close()

    def _forget_if_gone(self) -> None:
        # A rank says nothing before it is told what to be: what can be read is its end.
        if any(map(_readable, self._sockets.values())):
            self.close()
            self._sockets.clear()

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


async def join_ranks(launch: Launch) -> dict[int, LaunchedRank]:
    """All ranks of a node but its own, once they have joined.

    Args:
        launch: What the launcher says to this process, rank 0.

    Raises:
        UnavailableError: Its address cannot be listened on, or some have not come in time.
    """
    async with RankListener(launch) as listener:
        await listener.wait_joined()
    return listener.ranks


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
        self._listener = listen(launch.host, launch.port, "MASTER_ADDR, MASTER_PORT")
        self._listener.setblocking(False)
        self._news = asyncio.Event()
        self.ranks = {rank: LaunchedRank() for rank in range(1, launch.num_ranks)}

    async def __aenter__(self) -> "RankListener":
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, _: object, error: object, __: object) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        if error is not None:
            for rank in self.ranks.values():
                rank.close()

    async def wait_joined(self) -> None:
        """Waits until all ranks have joined.

        Raises:
            UnavailableError: Some have not in time.
        """
        log.info("waiting for ranks", extra={"ranks": len(self.ranks), "at": self._launch.address})
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                while not all(rank.joined for rank in self.ranks.values()):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            missing = [str(number) for number, rank in self.ranks.items() if not rank.joined]
            raise UnavailableError(
                f"ranks {', '.join(missing)} of {self._launch.num_ranks} have not joined at "
                f"{self._launch.address} within {JOIN_TIMEOUT_S:g} s"
            ) from None

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as guests:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    log.warning("a rank cannot be received", extra={"reason": error.strerror})
                    await asyncio.sleep(JOIN_RETRY_S)
                    continue
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
                greeting = Greeting.parse(line)
                refusal = self._refusal(greeting)
                await loop.sock_sendall(connection, f"{refusal or WELCOME}\n".encode())
            if not refusal:
                keep_alive(connection)
                self.ranks[greeting.rank].add(greeting.channel, connection, greeting.pid)
                kept = True
                self._news.set()
        except (OSError, TimeoutError, ValueError, RecursionError) as error:
            refusal = str(error)
        finally:
            if not kept:
                connection.close()
        if refusal:
            log.warning("a rank was turned away", extra={"reason": refusal})

    def _refusal(self, greeting: Greeting) -> str:
        """Why that is none of ours; empty if it is."""
        ours = Greeting.of(self._launch, greeting.channel)
        for name in ("version", "job", "num_ranks"):
            mine, theirs = getattr(ours, name), getattr(greeting, name)
            if mine != theirs:
                return f"{name}: rank {greeting.rank} has {theirs!r}, its node has {mine!r}"
        if greeting.rank not in self.ranks or greeting.channel not in CHANNELS:
            return f"rank {greeting.rank}: no such rank joins a node"
        if refusal := self.ranks[greeting.rank].refusal(greeting.channel, greeting.pid):
            return f"rank {greeting.rank}: {refusal}"
        return ""


def listen(host: str, port: int, name: str) -> socket.socket:
    """A listening socket.

    Args:
        host: Where.
        port: Where; 0 takes any that is free.
        name: Who said so, for the error.

    Raises:
        UnavailableError: It cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        # What is wrong with a name has codes of its own; else Python's text repeats the address.
        looked_up = isinstance(error, socket.gaierror)
        reason = error.strerror if looked_up else os.strerror(error.errno or 0)
        raise UnavailableError(f"{name}: cannot listen on {host}:{port} ({reason})") from error


def _readable(connection: socket.socket) -> bool:
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
