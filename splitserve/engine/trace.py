"""When each rank computed each step, for people and their tools to look at."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splitserve.core.errors import InvalidArgumentError
from splitserve.engine.batch import Batch


class StepTrace:
    """Writes one file in Chrome's trace event format, which Perfetto opens: a line per step.

    Ranks of one host share a clock, so their files laid together show which stages were busy at
    once. A closing bracket is optional in the format: a file is complete at any moment.

    Args:
        path: The file, made anew; None writes nothing.
        rank: Whose steps they are.

    Raises:
        InvalidArgumentError: It cannot be written.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._rank = rank
        self._file = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", buffering=1, encoding="ascii")
        except OSError as error:
            raise InvalidArgumentError(f"trace_dir: {path} cannot be written: {error}") from error
        self._file.write("[\n")

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Times what is done with a batch."""
        if self._file is None:
            yield
            return
        begin_ns = time.time_ns()
        yield
        event = {
            "name": "step",
            "ph": "X",
            "pid": os.getppid(),
            "tid": self._rank,
            "ts": begin_ns / 1000,
            "dur": (time.time_ns() - begin_ns) / 1000,
            "args": {"requests": len(batch.rows), "tokens": batch.num_tokens},
        }
        self._file.write(json.dumps(event) + ",\n")
