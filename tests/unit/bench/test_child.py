"""Children answer, say why they ended, and are reaped."""

import subprocess
import sys
from pathlib import Path

import pytest
from scripted_router import eventually

from bench.child import CHECKOUT, Child, ChildError


def test_a_child_that_ends_says_why_instead_of_leaving_its_parent_waiting():
    child = Child("bench.not_there")
    with child, pytest.raises(ChildError, match=r"exit code 1:\n.*No module named"):
        child.ask(what="anything")


def test_a_child_answers_and_ends_with_its_parent_s_end_of_the_pipe():
    with Child("bench.relay_bare") as child:
        assert child.ask().startswith("127.0.0.1:")
        process = child._process
    assert process.returncode == 0


def test_a_paused_child_computes_nothing_and_is_still_reaped():
    with Child("bench.relay_bare") as child:
        child.ask()
        child.pause()
        pid = child._process.pid
        eventually(lambda: _state(pid) == "T", "it is stopped")
    assert child._process.returncode == 0


def test_a_child_whose_parent_dies_while_it_is_paused_does_not_stay():
    parent = (
        "import os; from bench.child import Child; child = Child('bench.relay_bare'); child.ask();"
        " child.pause(); print(child._process.pid, flush=True); os._exit(1)"
    )
    told = subprocess.run([sys.executable, "-c", parent], cwd=CHECKOUT, stdout=subprocess.PIPE)
    eventually(lambda: _state(int(told.stdout)) in "Z-", "it has ended")


def _state(pid: int) -> str:
    """A process's state as the kernel names it, "-" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "-"
