"""A rank's process that its node starts itself, on its own host."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_HELD_BACK = (signal.SIGINT, signal.SIGTERM)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class SpawnedRank:
    """A `RankProcess` that is a child; started at once.

    Args:
        rank: Which it is.
        threads: Compute threads it has.
        listener: The first rank's: the socket where ranks meet.
        only_here: Whether all ranks run on this host.

    Attributes:
        pid: The process's id.
        ended: How it ended.
    """

    def __init__(
        self, rank: int, threads: int, listener: socket.socket | None, *, only_here: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        steps, their_steps = socket.socketpair()
        pulls, their_pulls = socket.socketpair()
        # The worker leaves when nobody has the other end any more, however that came about.
        their_death, self._death_fd = os.pipe()
        self._sockets = (steps, pulls)
        fds = (their_steps.fileno(), their_pulls.fileno(), their_death)
        environment = worker_environment(threads)
        if only_here:
            # Ranks of one host meet on it, whatever its name resolves to.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._process = _popen(worker_command(rank, fds), fds, listener, environment)
        self.pid = self._process.pid
        their_steps.close()
        their_pulls.close()
        os.close(their_death)
        self._pid_fd = os.pidfd_open(self.pid)
        loop.add_reader(self._pid_fd, self._on_exit)
        log.info("worker started", extra={"rank": rank, "pid": self.pid})

    @property
    def name(self) -> str:
        """Which process it is."""
        return f"worker process {self.pid}"

    async def connect(self) -> tuple[socket.socket, socket.socket]:
        """The sockets that it was born with."""
        return self._sockets

    def kill(self) -> None:
        """Ends it at once."""
        if self._process.returncode is None:
            self._process.kill()

    def close(self) -> None:
        """Lets go of the pipe and of the sockets."""
        os.close(self._death_fd)
        for end in self._sockets:
            end.close()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        code = self._process.wait()
        self.ended.set_result(
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )


def worker_command(rank: int, fds: tuple[int, int, int]) -> list[str]:
    """What a rank's process runs, given the sockets for steps and pulls, and its death pipe."""
    return [
        *(sys.executable, "-m", "splitserve.engine.worker", "--rank", str(rank)),
        *("--steps-fd", str(fds[0]), "--pulls-fd", str(fds[1]), "--death-fd", str(fds[2])),
        *("--log-level", logging.getLevelName(logging.getLogger().getEffectiveLevel())),
    ]


def worker_environment(threads: int) -> dict[str, str]:
    """What it runs in."""
    return os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads))


@contextmanager
def signals_held_back() -> Iterator[None]:
    """What starts inside inherits a mask against the signals that stop a node.

    A terminal's Ctrl-C and a supervisor's SIGTERM reach the worker too; it must stay until the
    node has drained. So they never do, from its first instruction.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _popen(
    command: list[str],
    fds: tuple[int, int, int],
    listener: socket.socket | None,
    environment: dict[str, str],
) -> subprocess.Popen[bytes]:
    passed = list(fds)
    if listener is not None:
        passed.append(listener.fileno())
        command = [*command, "--listener-fd", str(listener.fileno())]
    with signals_held_back():
        return subprocess.Popen(command, pass_fds=passed, env=environment, stdin=subprocess.DEVNULL)
