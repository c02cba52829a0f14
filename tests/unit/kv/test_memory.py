import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.core.errors import ResourceExhaustedError, UnavailableError
from splitserve.core.ticket import new_epoch
from splitserve.kv.memory import (
    SEGMENT_DIR,
    Segment,
    free_bytes,
    remove,
    segment_name,
    sweep_stale,
)

OWNER = """
import sys
from splitserve.kv.memory import Segment
segment = Segment.create(sys.argv[1], 4096)
segment.buffer[:4] = b"live"
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name():
    name = segment_name(new_epoch(), 0)
    yield name
    assert not (SEGMENT_DIR / name).exists(), "every test takes its segment away"


@pytest.fixture
def owner(name):
    """Another process that owns a segment."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()
    remove(name)


def mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


def test_what_the_owner_writes_a_peer_reads(name):
    owned = Segment.create(name, 10_000)
    owned.buffer[9_990:] = b"0123456789"
    peer = Segment.open_readonly(name)
    assert peer.buffer[9_990:] == b"0123456789"
    assert peer.size_bytes == owned.size_bytes == 10_000
    peer.close()
    owned.close()


def test_a_new_segment_is_zero_and_nobody_elses(name):
    owned = Segment.create(name, 4096)
    assert bytes(owned.buffer) == bytes(4096)
    assert stat.S_IMODE((SEGMENT_DIR / name).stat().st_mode) == 0o600
    owned.close()


def test_a_peer_cannot_write(name):
    owned = Segment.create(name, 4096)
    peer = Segment.open_readonly(name)
    with pytest.raises(TypeError):
        peer.buffer[0] = 1
    peer.close()
    owned.close()


def test_only_the_owners_close_takes_the_name_away(name):
    owned = Segment.create(name, 4096)
    peer = Segment.open_readonly(name)
    peer.close()
    assert owned.linked
    owned.close()
    assert not owned.linked


def test_close_may_be_called_again(name):
    owned = Segment.create(name, 4096)
    peer = Segment.open_readonly(name)
    for segment in (owned, owned, peer, peer):
        segment.close()
    assert not mapped(name)


def test_views_outlive_close_and_the_memory_goes_with_the_last_of_them(name):
    owned = Segment.create(name, 4096)
    owned.buffer[:4] = b"kept"
    view = memoryview(owned.buffer)
    owned.close()
    assert bytes(view[:4]) == b"kept"
    assert mapped(name)
    del view
    assert not mapped(name)


def test_a_second_owner_of_a_name_is_refused(name, owner):
    with pytest.raises(FileExistsError):
        Segment.create(name, 4096)


def test_too_little_memory_is_a_clear_error_and_leaves_nothing(name):
    size_bytes = 2**50
    with pytest.raises(ResourceExhaustedError, match=f"{size_bytes:,} bytes") as caught:
        Segment.create(name, size_bytes)
    assert "are free in /dev/shm" in caught.value.message
    assert not (SEGMENT_DIR / name).exists()


def test_what_is_free_is_no_more_than_the_file_system_has():
    stats = os.statvfs(SEGMENT_DIR)
    assert 0 < free_bytes() <= stats.f_blocks * stats.f_frsize


@pytest.mark.parametrize("bad", ["../../etc/passwd", "splitserve-x-0/../../x", "", "other-1-0"])
def test_a_peers_name_never_leads_elsewhere(bad):
    with pytest.raises(UnavailableError, match="not a segment's name"):
        Segment.open_readonly(bad)


def test_a_link_is_not_followed(name):
    (SEGMENT_DIR / name).symlink_to("/etc/passwd")
    with pytest.raises(UnavailableError):
        Segment.open_readonly(name)
    (SEGMENT_DIR / name).unlink()


def test_a_segment_that_is_gone_is_unavailable(name):
    with pytest.raises(UnavailableError, match=name):
        Segment.open_readonly(name)


def test_a_sweep_spares_the_living_and_takes_the_killed(name, owner):
    assert name not in sweep_stale()
    peer = Segment.open_readonly(name)
    owner.kill()
    owner.wait()
    assert name in sweep_stale()
    assert not peer.linked
    assert peer.buffer[:4] == b"live", "what is mapped stays readable"
    peer.close()


def test_a_sweep_spares_what_peers_have_open_only_while_the_owner_lives(name, owner):
    peer = Segment.open_readonly(name)
    owner.kill()
    owner.wait()
    assert name in sweep_stale(), "a reader's mapping is no ownership"
    peer.close()


def test_a_sweep_leaves_other_files_alone():
    other = SEGMENT_DIR / f"splitserve-{new_epoch()}-notes"
    other.touch()
    try:
        sweep_stale()
        assert other.exists()
    finally:
        other.unlink()


def test_a_creator_that_a_sweep_has_robbed_starts_over(name, monkeypatch):
    lock = fcntl.flock
    robbed = []

    def rob_once(fd: int, how: int) -> None:
        if not robbed:
            robbed.append(name)
            (SEGMENT_DIR / name).unlink()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", rob_once)
    owned = Segment.create(name, 4096)
    assert robbed
    assert owned.linked
    assert name not in sweep_stale()
    owned.close()


def test_a_failed_mapping_leaves_no_file(name, monkeypatch):
    def no_memory(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    with pytest.raises(ResourceExhaustedError, match="No space left on device"):
        Segment.create(name, 4096)
