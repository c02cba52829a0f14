"""Somebody else's server, started for its turn and stopped after it: each has the machine alone."""

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2

from bench.child import MAX_ERROR_LINES, ChildError

START_TIMEOUT_S = 600.0
START_POLL_S = 0.5
STOP_TIMEOUT_S = 30.0


@contextmanager
def running(command: str, url: str) -> Iterator[None]:
    """Runs a server until the block is left; the block begins when it answers.

    Args:
        command: Its command line; no shell reads it.
        url: Of its API, up to and with ``/v1``.

    Raises:
        ChildError: It ended, or did not answer in time; carries its last lines.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            if not _answers(process, url):
                log.seek(0)
                lines = log.read().decode(errors="replace").splitlines()[-MAX_ERROR_LINES:]
                raise ChildError("\n".join([f"{command!r} does not answer at {url}:", *lines]))
            yield
        finally:
            _stop(process)


def _answers(process: "subprocess.Popen[bytes]", url: str) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{url.rstrip('/')}/models", trust_env=False).is_success:
                return True
        time.sleep(START_POLL_S)
    return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends it and all it has started, kindly first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
