"""Everything that crosses the wire comes back as it was."""

from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import ResourceExhaustedError
from splitserve.core.lifetime import KvTransfer, Lifetime, LifetimeEvent, LifetimeEventKind
from splitserve.core.node import NodeInfo, NodeKind, NodeStatus, RankInfo
from splitserve.core.request import FinishReason, Progress, Request, TokenLogprob
from splitserve.core.sampling import SamplingParams
from splitserve.kv.handle import KvHandle, RankMemory
from splitserve.kv.layout import KVLayout
from splitserve.rpc import convert
from splitserve.v1 import common_pb2

unit = st.floats(0, 1, exclude_min=True)
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 100),
    top_p=unit,
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
    ignore_eos=st.booleans(),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 10),
    logprobs=st.none() | st.integers(0, 20),
)


@given(params)
def test_sampling_params_survive_to_the_last_bit(value):
    sent = convert.sampling_to_proto(value).SerializeToString()
    assert convert.sampling_from_proto(common_pb2.SamplingParams.FromString(sent)) == value


def test_unset_fields_take_the_defaults_and_set_zeros_stay_zero():
    assert convert.sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()
    zero = common_pb2.SamplingParams(temperature=0.0, seed=0, logprobs=0)
    assert convert.sampling_from_proto(zero) == SamplingParams(temperature=0.0, seed=0, logprobs=0)


EVENT = LifetimeEvent(
    LifetimeEventKind.MIGRATION_END, 1_700_000_000_123_456_789, "n", KvTransfer("shm", 2**40, 7)
)
INFO = NodeInfo(
    NodeKind.DECODE, "h:1", "e", "m", "f-w", 49_152, "bfloat16", 32, 99, 8192, ("shm",), "0.1",
    (RankInfo(2**40, 3), RankInfo(4, 2**41)),
)  # fmt: skip


def test_progress():
    for value in (
        Progress("t", [1, 2], [TokenLogprob(1, -0.25, ((1, -0.25), (3, -2.0)))], [EVENT]),
        Progress("t", finish_reason=FinishReason.LENGTH),
    ):
        assert convert.progress_from_proto(convert.progress_to_proto(value)) == value


def test_a_failure_in_progress_keeps_its_class():
    sent = convert.progress_to_proto(Progress("t", error=ResourceExhaustedError("queue: full")))
    error = convert.progress_from_proto(sent).error
    assert type(error) is ResourceExhaustedError
    assert error.message == "queue: full"


def test_lifetime():
    value = Lifetime("r", [EVENT, LifetimeEvent(LifetimeEventKind.FINISHED, 5)], 12, "stop")
    assert convert.lifetime_from_proto(convert.lifetime_to_proto(value)) == value


def test_node_info_and_status():
    status = NodeStatus(INFO, 10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, True)
    assert convert.node_status_from_proto(convert.node_status_to_proto(status)) == status


def test_handle():
    layout = KVLayout(30, 3, 64, 16, "bfloat16", 0, 15, 1, 3)
    value = KvHandle("shm", 33, (4, 9, 1), (RankMemory(layout, 10, "splitserve-e-0"),))
    assert convert.handle_from_proto(convert.handle_to_proto(value)) == value


def test_request():
    value = Request("r", [1, 2, 3], 2, SamplingParams(max_tokens=4, seed=9), "ticket")
    back = convert.request_from_proto(convert.request_to_proto(value))
    names = ("request_id", "token_ids", "prompt_length", "sampling", "ticket")
    assert [getattr(back, name) for name in names] == [getattr(value, name) for name in names]
