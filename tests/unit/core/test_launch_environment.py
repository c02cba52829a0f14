from pathlib import Path

import pytest

from splitserve.core.config import EngineConfig
from splitserve.core.errors import InvalidArgumentError
from splitserve.core.launch import Launch
from splitserve.core.parallel import ParallelConfig

BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = BY_HAND | {
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "job",
}


def test_the_environment_says_which_rank_this_is():
    assert Launch.from_environment(BY_HAND) == Launch(1, 4, 1, "10.0.0.1", 29500)
    launch = Launch.from_environment(TORCHRUN)
    assert launch == Launch(1, 4, 2, "10.0.0.1", 29501, "job")
    assert launch.address == "10.0.0.1:29501", "torchrun holds the port itself"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": ""}, "RANK: '' is not allowed"),
        ({"RANK": "4"}, "RANK: 4 is not allowed; allowed: 0 to 3"),
        ({"RANK": "-1"}, "RANK: '-1' is not allowed; allowed: a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: 0 is not allowed"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE: 5 is not allowed; allowed: 1 to 4"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: '' is not allowed"),
        ({"MASTER_PORT": "65535"}, "MASTER_PORT: 65536 is not allowed"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Launch.from_environment(TORCHRUN | changes)


def test_there_are_as_many_processes_as_ranks():
    launch = Launch.from_environment(TORCHRUN)
    assert EngineConfig(Path(), parallel=ParallelConfig(2, 2), launch=launch).launch == launch
    with pytest.raises(InvalidArgumentError, match=r"WORLD_SIZE: 4 .* pipeline_parallel_size, 2"):
        EngineConfig(Path(), parallel=ParallelConfig(1, 2), launch=launch)
