"""Shared-memory segments: a CPU rank's KV, where its peers can read it.

We open, map and unlink them ourselves: Python 3.11's `multiprocessing.shared_memory` unlinks a
segment when any process that looked at it ends.

Who owns a segment holds an exclusive `flock` on it for its whole life. The kernel lets go of the
lock however the owner ends, so a stale segment is exactly one whose lock can be taken. Only the
holder of the lock unlinks; so whoever holds it and still finds a link knows that the name is its
file's.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import re
from pathlib import Path

from splitserve.core.errors import ResourceExhaustedError, UnavailableError

log = logging.getLogger(__name__)

SEGMENT_DIR = Path("/dev/shm")
_PREFIX = "splitserve-"
_NAME = re.compile(rf"{_PREFIX}[0-9A-Za-z]+-\d+")
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module


def segment_name(epoch: str, rank: int) -> str:
    """The name of a rank's segment; `epoch` makes it one that never comes again."""
    return f"{_PREFIX}{epoch}-{rank}"


def free_bytes() -> int:
    """Bytes that a new segment can have: free in the file system and in the machine's memory."""
    stats = os.statvfs(SEGMENT_DIR)
    return min(stats.f_bavail * stats.f_frsize, available_memory_bytes())


def available_memory_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UnavailableError("/proc/meminfo: no MemAvailable; Linux 3.14 or newer is needed")


class Segment:
    """A mapped segment; use `create` or `open_readonly`.

    Attributes:
        name: Its file's name under `SEGMENT_DIR`.
        size_bytes: Its size.
    """

    def __init__(self, name: str, mapping: mmap.mmap, owner_fd: int | None) -> None:
        self.name = name
        self.size_bytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._owner_fd = owner_fd

    @classmethod
    def create(cls, name: str, size_bytes: int) -> "Segment":
        """Makes a segment of zeros that is this process's until `close`.

        All its memory is taken now: running out later would be a SIGBUS in the middle of a step.

        Raises:
            ResourceExhaustedError: There is not that much memory.
            FileExistsError: A live process owns a segment of that name.
        """
        fd = _create_locked(SEGMENT_DIR / name)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            mapping = mmap.mmap(fd, size_bytes)
        except OSError as error:
            (SEGMENT_DIR / name).unlink()
            os.close(fd)
            raise ResourceExhaustedError(
                f"KV cache: {size_bytes:,} bytes of shared memory cannot be had "
                f"({error.strerror}); {free_bytes():,} are free in {SEGMENT_DIR}"
            ) from error
        # One call instead of a page fault per 4 KiB; older kernels fault on first use.
        with contextlib.suppress(OSError):
            mapping.madvise(_MADV_POPULATE_WRITE)
        return cls(name, mapping, fd)

    @classmethod
    def open_readonly(cls, name: str) -> "Segment":
        """Maps another process's segment; writing to it is a crash, not a corruption.

        Raises:
            UnavailableError: There is no such segment, or it is not ours to read.
        """
        if not _NAME.fullmatch(name):
            # Names come from peers: never follow one out of the directory.
            raise UnavailableError(f"shared memory: {name!r} is not a segment's name")
        try:
            fd = os.open(SEGMENT_DIR / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise UnavailableError(
                f"shared memory: {name} cannot be opened ({error.strerror}); "
                "its node has stopped or runs on another host"
            ) from error
        try:
            return cls(name, mmap.mmap(fd, 0, prot=mmap.PROT_READ), None)
        except (OSError, ValueError) as error:
            raise UnavailableError(f"shared memory: {name} cannot be mapped ({error})") from error
        finally:
            os.close(fd)

    @property
    def buffer(self) -> mmap.mmap:
        """The mapped bytes."""
        assert self._mapping is not None, f"{self.name} is closed"
        return self._mapping

    @property
    def linked(self) -> bool:
        """Whether the name is still there, that is, whether the owner still lives."""
        return (SEGMENT_DIR / self.name).exists()

    def close(self) -> None:
        """Lets go of the memory; the owner's takes the name away. May be called again.

        Arrays over the buffer stay valid; the memory goes when the last of them does.
        """
        mapping, self._mapping = self._mapping, None
        fd, self._owner_fd = self._owner_fd, None
        if fd is not None:
            (SEGMENT_DIR / self.name).unlink(missing_ok=True)
            os.close(fd)
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()


def remove(name: str) -> bool:
    """Unlinks the segment of a process that is known to be dead; says whether it was there."""
    try:
        (SEGMENT_DIR / name).unlink()
    except FileNotFoundError:
        return False
    return True


def sweep_stale() -> list[str]:
    """Unlinks the segments whose owners are gone, whatever ended them; returns their names."""
    names = [
        path.name
        for path in sorted(SEGMENT_DIR.glob(f"{_PREFIX}*"))
        if _NAME.fullmatch(path.name) and _unlink_if_stale(path)
    ]
    for name in names:
        log.warning("removed a dead node's memory", extra={"segment": name})
    return names


def _create_locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        # A sweep took the lock between our two calls, and with it the name.
        os.close(fd)


def _unlink_if_stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # Gone meanwhile, or another user's.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(fd).st_nlink:
            return False
        path.unlink()
    except OSError:
        return False  # Its owner lives.
    finally:
        os.close(fd)
    return True
