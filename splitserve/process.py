"""A daemon as a child process: started, watched and stopped from here, never imported."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from splitserve.core.errors import UnavailableError

DaemonKind = Literal["router", "prefill", "decode"]

STOP_TIMEOUT_S = 15.0
"""How long daemons have between SIGTERM and SIGKILL."""

MAX_ERROR_LINES = 20
"""Last lines of a failed daemon's log that its error carries."""

_COMMANDS: dict[DaemonKind, tuple[str, str]] = {
    "router": ("router.cli", "router"),
    "prefill": ("prefill_node.cli", "prefill-node"),
    "decode": ("decode_node.cli", "decode-node"),
}

# Asks the kernel for a SIGTERM when the parent dies, then becomes the daemon: a killed parent
# leaves nothing behind. A program of its own does this because `preexec_fn` runs Python
# between fork and exec, which can deadlock in a process with threads, and gRPC has many.
# The kernel means the parent *thread*: only start daemons from one that outlives them.
_LAUNCHER = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this daemon is gone")
os.execv(sys.executable, [sys.executable, "-P", "-m", *sys.argv[2:]])
"""


@dataclass(slots=True, eq=False)
class DaemonProcess:
    """A running daemon.

    Attributes:
        kind: Which daemon.
        process: The child process.
        output_path: File with its standard output.
        log_path: File with its standard error.
        address: Where it serves, ``host:port``; empty until it is ready.
    """

    kind: DaemonKind
    process: subprocess.Popen[bytes]
    output_path: Path
    log_path: Path
    address: str = ""

    @classmethod
    def start(
        cls, kind: DaemonKind, label: str, options: Mapping[str, object], directory: Path
    ) -> "DaemonProcess":
        """Starts a daemon and does not wait for it.

        Args:
            kind: Which daemon.
            label: Name of its files in ``directory``.
            options: Command-line options by their names with underscores; True is a flag,
                False and None leave the option out.
            directory: Takes its standard output and error.
        """
        module, _ = _COMMANDS[kind]
        output_path, log_path = directory / f"{label}.out", directory / f"{label}.log"
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        with output_path.open("wb") as output, log_path.open("wb") as log:
            process = subprocess.Popen(
                [*launcher, module, "start", *option_arguments(options)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                # Ctrl-C in a terminal reaches its whole foreground group. In a session of their
                # own, daemons hear of it once, from us; a second signal would cut the drain.
                start_new_session=True,
            )
        return cls(kind, process, output_path, log_path)

    @property
    def pid(self) -> int:
        """Its process id, also that of its session: workers included."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs; a daemon that has ended is reaped by this."""
        return self.process.poll() is None

    def ready(self) -> bool:
        """Whether it has written its ready line; its address is known from then on.

        Raises:
            UnavailableError: It has ended; carries its last lines.
        """
        if not self.address:
            _, name = _COMMANDS[self.kind]
            prefix = f"{name} ready on "
            for line in self.output_path.read_text(errors="replace").splitlines(keepends=True):
                if line.startswith(prefix) and line.endswith("\n"):
                    self.address = line.removeprefix(prefix).strip()
        self.check_alive()
        return bool(self.address)

    def check_alive(self) -> None:
        """Raises `UnavailableError` with its last lines if it has ended."""
        if self.alive:
            return
        _, name = _COMMANDS[self.kind]
        lines = self.log_path.read_text(errors="replace").splitlines()[-MAX_ERROR_LINES:]
        raise UnavailableError(
            "\n".join([f"{name} ended with exit code {self.process.returncode}:", *lines])
        )


def stop_daemons(daemons: Sequence[DaemonProcess], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Tells daemons to drain, waits, and kills what is left; reaps all of them."""
    deadline = time.monotonic() + timeout_s
    try:
        for daemon in daemons:
            if daemon.alive:
                daemon.process.send_signal(signal.SIGTERM)
        for daemon in daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        # Also on a second Ctrl-C. Workers share the daemon's session and go with it.
        for daemon in daemons:
            if daemon.alive:
                with suppress(ProcessLookupError):
                    os.killpg(daemon.pid, signal.SIGKILL)
                daemon.process.wait()


def option_arguments(options: Mapping[str, object]) -> list[str]:
    """Options as a daemon's command line spells them."""
    arguments = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if value is not True:
            arguments.append(str(value))
    return arguments
