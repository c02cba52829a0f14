"""The kernels of processors with less than this one has compute the same.

Which kernels run is settled when their library is loaded: each takes a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve import native

pytestmark = pytest.mark.skipif(not native.available, reason="the kernels are not built")

HERE = Path(__file__).parent


@pytest.mark.parametrize("instruction_set", ["plain", "avx2"])
@pytest.mark.parametrize(
    ("file", "only"),
    [
        ("test_native.py", ""),
        ("test_families.py", "native and (llama or gpt2 or gemma2 or qwen3_moe)"),
    ],
    ids=["kernels", "families"],
)
def test_other_processors_kernels_are_right_too(instruction_set: str, file: str, only: str):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE / file, "-k", only],
        env={**os.environ, "SPLITSERVE_KERNELS": instruction_set},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-3000:]
