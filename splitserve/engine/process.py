"""One worker, as its node sees it: a process, and two links to it."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol

from splitserve.core.errors import InternalError
from splitserve.engine.batch import Batch
from splitserve.engine.messages import Call, Failure, Ready, Reply, Start, encode, take
from splitserve.kv.memory import remove, segment_name
from splitserve.transfer.transport import PullJob

log = logging.getLogger(__name__)

PULL_TIMEOUT_S = 60.0
"""Limit of one pull, those before it included; copying a whole cache takes seconds."""

EXIT_GRACE_S = 1.0
"""How long a worker that has closed a socket may take to exit before it is killed."""


class RankProcess(Protocol):
    """A rank's process, however it came to be.

    Attributes:
        ended: How it ended; set once nothing of it runs.
    """

    ended: asyncio.Future[str]

    @property
    def name(self) -> str:
        """Which process it is, for people."""

    async def connect(self) -> tuple[socket.socket, socket.socket]:
        """The node's ends of the sockets for steps and for pulls."""

    def kill(self) -> None:
        """Ends it at once; one that has ended stays so."""

    def close(self) -> None:
        """Lets go of what the node held for it, once it has ended."""


class _Link(asyncio.Protocol):
    """The node's end of one socket.

    Args:
        on_open: Called once, when the link stands.
        on_message: Takes each message.
        on_end: Called once after that, when the worker's end is gone.
    """

    def __init__(
        self,
        on_open: Callable[[], None],
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_open = on_open
        self._on_message = on_message
        self._on_end = on_end
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._on_open()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (message := take(self._buffer)) is not None:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def send(self, message: Any) -> None:
        """Sends a message; one for a worker that is gone is dropped."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def finish(self) -> None:
        """Says that nothing more will be sent."""
        if not self._transport.is_closing():
            self._transport.write_eof()


class WorkerProcess:
    """A rank's process made a worker: `connect`, then `begin`.

    Args:
        start: What it is to be.
        process: What is to be it.

    Attributes:
        process: That.
        ready: What the worker has become, or why it could not.
        ended: Why it ended; set once nothing of it runs, and all its calls are over.
    """

    def __init__(self, start: Start, process: RankProcess) -> None:
        loop = asyncio.get_running_loop()
        self.process = process
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._start = start
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_call = 0
        self._fault: Failure | None = None
        self._steps: _Link | None = None
        self._pulls: _Link | None = None
        # The process and its links; it has ended, and all it said is heard, when all have.
        self._open_ends = 1
        process.ended.add_done_callback(lambda _: self._on_end())

    async def connect(self) -> None:
        """Waits for the process, if it has to come first, and links to it."""
        steps, pulls = await self.process.connect()
        self._steps, self._pulls = await self._link(steps), await self._link(pulls)

    def begin(self) -> None:
        """Tells the process what to be; `ready` says what came of it."""
        assert self._steps is not None, "connected before it is told"
        self._steps.send(self._start)

    async def _link(self, end: socket.socket) -> _Link:
        end.setblocking(False)
        _, link = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: _Link(self._on_open, self._on_message, self._on_end), end
        )
        return link

    def step(self, batch: Batch) -> asyncio.Future[Any]:
        """Has a step computed, by the rank that samples."""
        return self._call(self._steps, batch)

    def take_part(self, batch: Batch) -> None:
        """Has a step computed, by a rank that does not reply."""
        assert self._steps is not None, "connected before it is called"
        self._steps.send(Call(0, batch))

    def pull(self, job: PullJob) -> asyncio.Future[Any]:
        """Has KV pulled; done only once nothing writes to the blocks any more."""
        future = self._call(self._pulls, job)
        # A worker that does not finish is stuck; without it, nothing writes either.
        late = asyncio.get_running_loop().call_later(PULL_TIMEOUT_S, self.kill)
        future.add_done_callback(lambda _: late.cancel())
        return future

    async def stop(self, timeout_s: float) -> None:
        """Asks the worker to leave, kills it if it does not, and clears what it left behind."""
        if self._steps is not None:
            self._steps.finish()
            await asyncio.wait([self.ended], timeout=timeout_s)
        self.kill()
        await asyncio.wait([self.ended])

    def kill(self) -> None:
        """Ends the process at once."""
        if not self.process.ended.done():
            log.info(
                "worker killed",
                extra={"rank": self._start.rank, "worker": self.process.name},
            )
            self.process.kill()

    def _call(self, link: _Link | None, work: Batch | PullJob) -> asyncio.Future[Any]:
        assert link is not None, "connected before it is called"
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.ended.done():
            _fail(future, InternalError(self.ended.result()))
            return future
        self._last_call += 1
        self._calls[self._last_call] = future
        link.send(Call(self._last_call, work))
        return future

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Failure):
            self._fault = message  # Its last words; `_conclude` passes them on.
        elif isinstance(message, Ready):
            if not self.ready.done():
                self.ready.set_result(message)
        else:
            assert isinstance(message, Reply)
            future = self._calls.pop(message.call_id)
            if isinstance(message.result, Failure):
                _fail(future, message.result.error())
            elif not future.done():
                future.set_result(message.result)

    def _on_open(self) -> None:
        self._open_ends += 1

    def _on_end(self) -> None:
        self._open_ends -= 1
        if self._open_ends == 0 and not self.ended.done():
            self._conclude()
        elif not self.process.ended.done():
            # Half a worker is none; but let one that leaves by itself tell its exit code.
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self.kill)

    def _conclude(self) -> None:
        self.process.close()
        remove(segment_name(self._start.epoch, self._start.rank))
        ranks = self._start.config.parallel.num_ranks
        which = f" (rank {self._start.rank} of {ranks})" if ranks > 1 else ""
        reason = f"{self.process.name}{which} {self.process.ended.result()}"
        if self._fault is not None:
            reason += f": {self._fault.message}"
        self.ended.set_result(reason)
        _fail(self.ready, self._fault.error() if self._fault else InternalError(reason))
        calls, self._calls = self._calls, {}
        for future in calls.values():
            _fail(future, InternalError(reason))


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Whoever waits gets it; with nobody waiting it is no news, `ended` says the same.
        future.exception()
