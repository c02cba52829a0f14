"""How every daemon's process starts, is told to stop, and ends."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from splitserve.core.errors import SplitserveError
from splitserve.core.logs import configure_logs

C = TypeVar("C")
T = TypeVar("T")

log = logging.getLogger(__name__)


class StoppedError(Exception):
    """The daemon was told to stop before it was ready."""


class StopSignals:
    """SIGTERM and SIGINT: the first asks to drain, the second to stop now.

    Attributes:
        drain: Set by the first signal.
        now: Set by the second.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def unless_told(self, start: Coroutine[Any, Any, T]) -> T:
        """What a start-up comes to; told to stop meanwhile, cancels it.

        Raises:
            StoppedError: It was.
        """
        starting = asyncio.ensure_future(start)
        told = asyncio.create_task(self.drain.wait())
        try:
            await asyncio.wait([starting, told], return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait([starting])
        if starting.cancelled():
            raise StoppedError
        return starting.result()

    def _on_signal(self, number: signal.Signals) -> None:
        log.info("told to stop", extra={"signal": number.name})
        (self.now if self.drain.is_set() else self.drain).set()

    async def drained(self, idle: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until ``idle()``, the time is over, or a second signal; says whether idle."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not idle():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or self.now.is_set():
                return False
            try:
                await asyncio.wait_for(self.now.wait(), min(left, IDLE_POLL_S))
            except TimeoutError:
                continue
        return True


IDLE_POLL_S = 0.02


def run_daemon(
    name: str,
    log_level: str,
    configure: Callable[[], C],
    serve: Callable[[C, StopSignals], Coroutine[Any, Any, None]],
) -> None:
    """Runs a daemon to its end.

    Exit code 0 after a requested stop. A `SplitserveError`, from the configuration or while it
    serves, is one line on standard error and exit code 1.
    """
    configure_logs(name, log_level)

    async def main(config: C) -> None:
        await serve(config, StopSignals())

    try:
        asyncio.run(main(configure()))
    except StoppedError:
        log.info("stopped before it was ready")
    except SplitserveError as error:
        sys.stderr.write(f"{name}: {error.message}\n")
        sys.exit(1)


def announce_ready(name: str, address: str) -> None:
    """The one line a daemon writes to standard output."""
    sys.stdout.write(f"{name} ready on {address}\n")
    sys.stdout.flush()
