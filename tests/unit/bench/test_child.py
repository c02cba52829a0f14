"""Children answer, say why they ended, and are reaped."""

import pytest

from bench.child import Child, ChildError


def test_a_child_that_ends_says_why_instead_of_leaving_its_parent_waiting():
    child = Child("bench.not_there")
    with child, pytest.raises(ChildError, match=r"exit code 1:\n.*No module named"):
        child.ask(what="anything")


def test_a_child_answers_and_ends_with_its_parent_s_end_of_the_pipe():
    with Child("bench.relay_bare") as child:
        assert child.ask().startswith("127.0.0.1:")
        process = child._process
    assert process.returncode == 0
