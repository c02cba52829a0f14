"""What a figure was measured on."""

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 512 * 2**20
"""Read to measure the memory: far more than any cache holds."""

READS = 5

MATMUL_SIZES = (512, 1024, 2048)
"""Rows and columns of the products that are measured; which is fastest depends on the caches."""

MATMULS = 5

QUIET_SHARE = 0.03
"""Others' share of the processors up to which figures can be trusted."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and what runs on it.

    Attributes:
        processor: Its processor's name.
        cores: Processors this process may use.
        load: How many others wanted them in the last minute; figures need a quiet machine.
        versions: Of Python and of what both sides are made of.
    """

    processor: str
    cores: int
    load: float
    versions: dict[str, str]

    @classmethod
    def here(cls, *packages: str) -> "Machine":
        """This machine, with the versions of the packages a question is about."""
        return cls(
            processor=_processor(),
            cores=available_cores(),
            load=round(os.getloadavg()[0], 2),
            versions={
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in packages},
            },
        )


class Disturbance:
    """How much others computed on this machine since this was made, its host included."""

    def __init__(self) -> None:
        self._busy_s = _busy_seconds()
        self._ours_s = _our_seconds()
        self._begin_s = time.monotonic()

    @property
    def share(self) -> float:
        """Of all processors' time; children of ours must have been reaped."""
        others_s = (_busy_seconds() - self._busy_s) - (_our_seconds() - self._ours_s)
        all_s = (time.monotonic() - self._begin_s) * (os.cpu_count() or 1)
        return max(0.0, others_s / all_s)


def available_cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))


def read_bandwidth(threads: int) -> float:
    """Bytes a second that this many threads read from memory together, the best of a few."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    data = torch.ones(READ_BYTES // 4)
    seconds = []
    for _ in range(READS):
        begin = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - begin)
    torch.set_num_threads(before)
    return READ_BYTES / min(seconds)


def matmul_rate(dtype: str, threads: int) -> float:
    """Operations a second of this many threads in torch's matrix product, the best of some."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rates = []
    for size in MATMUL_SIZES:
        left, right = torch.ones(2, size, size, dtype=getattr(torch, dtype))
        for _ in range(MATMULS):
            begin = time.perf_counter()
            torch.mm(left, right)
            rates.append(2 * size**3 / (time.perf_counter() - begin))
    torch.set_num_threads(before)
    return max(rates)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is really there."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _busy_seconds() -> float:
    """Time that all processors have spent on something, or were taken by the host."""
    line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    user, nice, system, _, _, irq, soft_irq, stolen = map(int, line.split()[1:9])
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")


def _our_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
