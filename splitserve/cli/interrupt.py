"""Ctrl-C while an answer streams."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from splitserve.client import Generation
from splitserve.core.errors import CancelledError


@contextmanager
def cancelled_by_ctrl_c(generation: Generation) -> Iterator[None]:
    """Within, Ctrl-C cancels the request, and then is a KeyboardInterrupt as ever.

    Python's own raises wherever the main thread happens to be, also between a lock of gRPC's and
    the line that knows of it.
    """
    over = threading.Event()
    pressed = False

    def on_press(*_: object) -> None:
        nonlocal pressed
        pressed = True
        over.set()

    def cancel() -> None:
        over.wait()
        generation.cancel()  # Harmless if it has ended.

    threading.Thread(target=cancel, daemon=True).start()
    before = signal.signal(signal.SIGINT, on_press)
    try:
        yield
    except CancelledError:
        if pressed:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
