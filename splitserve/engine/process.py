"""One worker process, as its node sees it."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

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

_HELD_BACK = (signal.SIGINT, signal.SIGTERM)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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
    """A rank's process, started at once; `connect` makes it a worker.

    Args:
        start: What it is to be.
        listener: The socket where ranks meet, for the first of several.

    Attributes:
        pid: The process's id.
        ready: What the worker has become, or why it could not.
        ended: Why the process ended; set once nothing of it runs, and all its calls are over.
    """

    def __init__(self, start: Start, listener: socket.socket | None) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._start = start
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_call = 0
        self._fault: Failure | None = None
        self._steps: _Link | None = None
        self._pulls: _Link | None = None
        steps, their_steps = socket.socketpair()
        pulls, their_pulls = socket.socketpair()
        # The worker leaves when nobody has the other end any more, however that came about.
        their_death, self._death_fd = os.pipe()
        self._sockets = (steps, pulls)
        fds = (their_steps.fileno(), their_pulls.fileno(), their_death)
        self._process = _popen(start, fds, listener)
        self.pid = self._process.pid
        their_steps.close()
        their_pulls.close()
        os.close(their_death)
        # The process and its links; it has ended, and all it said is heard, when all have.
        self._open_ends = 1
        self._pid_fd = os.pidfd_open(self.pid)
        loop.add_reader(self._pid_fd, self._on_exit)
        log.info("worker started", extra={"rank": start.rank, "pid": self.pid})

    async def connect(self) -> None:
        """Tells the process what to be; `ready` says what came of it."""
        self._steps, self._pulls = [await self._link(end) for end in self._sockets]
        self._steps.send(self._start)

    async def _link(self, end: socket.socket) -> _Link:
        end.setblocking(False)
        _, link = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Link(self._on_open, self._on_message, self._on_end), sock=end
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
        if self._process.returncode is None:
            log.info("worker killed", extra={"rank": self._start.rank, "pid": self.pid})
            self._process.kill()

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

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        self._process.wait()
        self._on_end()

    def _on_end(self) -> None:
        self._open_ends -= 1
        if self._open_ends == 0 and not self.ended.done():
            self._conclude()
        elif self._process.returncode is None:
            # Half a worker is none; but let one that leaves by itself tell its exit code.
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self.kill)

    def _conclude(self) -> None:
        os.close(self._death_fd)
        for end in self._sockets:
            end.close()
        remove(segment_name(self._start.epoch, self._start.rank))
        reason = _describe_exit(self._start, self._process)
        if self._fault is not None:
            reason += f": {self._fault.message}"
        self.ended.set_result(reason)
        _fail(self.ready, self._fault.error() if self._fault else InternalError(reason))
        calls, self._calls = self._calls, {}
        for future in calls.values():
            _fail(future, InternalError(reason))


def _popen(
    start: Start, fds: tuple[int, int, int], listener: socket.socket | None
) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "splitserve.engine.worker", "--rank", str(start.rank)),
        *("--steps-fd", str(fds[0]), "--pulls-fd", str(fds[1]), "--death-fd", str(fds[2])),
        *("--log-level", logging.getLevelName(logging.getLogger().getEffectiveLevel())),
    ]
    passed = list(fds)
    if listener is not None:
        passed.append(listener.fileno())
        command += ["--listener-fd", str(listener.fileno())]
    environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(start.config.threads))
    # Ranks of one host meet on it, whatever its name resolves to.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A terminal's Ctrl-C and a supervisor's SIGTERM reach the worker too; it must stay until the
    # node has drained. It inherits the mask, so that they never do, from its first instruction.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        return subprocess.Popen(command, pass_fds=passed, env=environment, stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _describe_exit(start: Start, process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    ranks = start.config.parallel.num_ranks
    which = f" (rank {start.rank} of {ranks})" if ranks > 1 else ""
    return f"worker process {process.pid}{which} {how}"


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Whoever waits gets it; with nobody waiting it is no news, `ended` says the same.
        future.exception()
