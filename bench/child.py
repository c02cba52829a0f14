"""A program under measurement in a process of its own, asked and answering in lines of JSON.

It ends when its standard input does: whatever becomes of this process, it leaves none behind.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

CHECKOUT = Path(__file__).parent.parent
STOP_TIMEOUT_S = 10.0
MAX_ERROR_LINES = 20

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ChildError(Exception):
    """A child ended before it answered; carries the last lines it wrote."""


class Child:
    """A module of ours that runs `serve`; ``with Child("bench.relay_client") as client``.

    Args:
        module: What to run.
        arguments: Its command line.
        threads: Compute threads it may use; None leaves the environment as it is.
        launcher: What runs it: another Python; empty if it is no module but a program.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        threads: int | None = None,
        launcher: Sequence[str] = (sys.executable, "-m"),
    ) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the child lives)
        variables = {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))
        self._process = subprocess.Popen(
            [*launcher, module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=CHECKOUT,
            env=os.environ | variables,
            # Ctrl-C is for us; we tell it. In our session, so that the kernel hangs up on it and
            # wakes it if we die while it is paused.
            process_group=0,
        )

    def ask(self, **question: Any) -> Any:
        """Asks and waits for the answer.

        Raises:
            ChildError: It ended instead.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # What it has said until then tells why.
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ChildError(self._last_words())
        return json.loads(line)

    def pause(self) -> None:
        """Stops it and all it has started until `resume`: it then computes nothing at all."""
        self._signal(signal.SIGSTOP)
        # Only one that has stopped by then is woken if we die.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Lets it go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it and all it has started, kindly first, and reaps it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.resume()
        with suppress(BrokenPipeError):  # It ended with a question unread.
            self._process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-MAX_ERROR_LINES:]
        return "\n".join([f"{self._module} ended with exit code {code}:", *lines])


async def serve(answer: Callable[..., Awaitable[Any]]) -> None:
    """The child's side: answers questions until there are no more.

    Args:
        answer: Takes a question's fields by name; what it returns is turned into JSON.
    """
    # What libraries print is no answer, neither from Python nor from C.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := await asyncio.to_thread(sys.stdin.readline):
        answers.write(json.dumps(await answer(**json.loads(line))) + "\n")
        answers.flush()
