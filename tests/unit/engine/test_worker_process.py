import subprocess
import sys
import time

import psutil
import pytest
from tiny_model import write_tiny_model

from splitserve.core.ticket import new_epoch
from splitserve.kv.memory import SEGMENT_DIR, segment_name

DEADLINE_S = 10.0
DAEMON = """
import asyncio, sys
from pathlib import Path
from splitserve.core.config import EngineConfig
from splitserve.engine.batch import Batch, BatchRow
from splitserve.engine.executor import Executor

async def main():
    config = EngineConfig(Path(sys.argv[1]), use_dummy_weights=True, num_blocks=1000)
    executor = await Executor.start(config, sys.argv[2])
    step = executor.execute(Batch((BatchRow(("", 0), (7,) * 16_000, 0, tuple(range(1000)), ()),)))
    task = asyncio.create_task(step)
    await asyncio.sleep(0)
    print(executor._workers[0].process.pid, flush=True)
    await task

asyncio.run(main())
"""


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path, max_position_embeddings=32_768)


def test_a_worker_goes_with_its_daemon_also_in_the_middle_of_a_step(model):
    epoch = new_epoch()
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, model, epoch], stdout=subprocess.PIPE
    ) as daemon:
        pid = int(daemon.stdout.readline())
        segment = SEGMENT_DIR / segment_name(epoch, 0)
        assert segment.exists()
        daemon.kill()
    deadline = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.01)
    assert not segment.exists()


def test_the_daemons_side_needs_no_torch():
    check = "import sys, splitserve.engine.executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
