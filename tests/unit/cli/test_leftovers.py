import subprocess
from pathlib import Path

import pytest

from splitserve.cli import demo
from splitserve.process import DaemonProcess


def daemon(*command: str) -> DaemonProcess:
    process = subprocess.Popen(command, start_new_session=True)
    return DaemonProcess("prefill", process, Path("out"), Path("log"))


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(demo, "LEFTOVER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(demo, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_a_worker_that_outlives_its_daemon_is_found(tmp_path: Path) -> None:
    left = daemon("sh", "-c", f"sleep 60 & echo $! > {tmp_path}/worker")
    left.process.wait()
    worker = (tmp_path / "worker").read_text().strip()
    try:
        assert demo.leftovers([left], []) == [f"process {worker}"]
    finally:
        subprocess.run(["kill", worker], check=True)
    assert demo.leftovers([left], []) == []


def test_shared_memory_of_these_epochs_is_found_and_no_one_elses(tmp_path: Path) -> None:
    for epoch in ("ours", "theirs"):
        (tmp_path / f"splitserve-prefill-{epoch}-0").touch()
    assert demo.leftovers([], ["ours"]) == [str(tmp_path / "splitserve-prefill-ours-0")]
