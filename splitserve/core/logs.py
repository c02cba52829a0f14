"""Structured logs: one line per event, ``key=value`` pairs behind the message.

A line may name requests, nodes and counts; never a prompt's text or its tokens.
"""

import logging
import sys
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class KeyValueFormatter(logging.Formatter):
    """Writes what a call passes as ``extra`` behind the message.

    Args:
        daemon: Name at the start of each line, for example ``"router"``.
    """

    def __init__(self, daemon: str) -> None:
        super().__init__()
        self._daemon = daemon

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback, if any, follows on lines of its own."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        extras = [
            f"{key}={value!r}" if " " in str(value) else f"{key}={value}"
            for key, value in vars(record).items()
            if key not in _STANDARD
        ]
        line = " ".join([moment, record.levelname, self._daemon, record.getMessage(), *extras])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logs(daemon: str, level: str = "INFO") -> None:
    """Sends the process's logs to standard error, formatted."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(daemon))
    logging.basicConfig(level=level, handlers=[handler], force=True)
