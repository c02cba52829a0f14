"""What a node and its workers say about a step survives the way, whatever is in it."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.request import TokenLogprob
from splitserve.core.sampling import SamplingParams
from splitserve.engine.batch import Batch, BatchRow, SampleSpec, StepOutput

IDS = st.integers(0, 2**32 - 1)
NUMBERS = st.lists(IDS, max_size=6).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 100),
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 2**63 - 1),
    stop=st.sampled_from([(), ("a", "b")]),
)
SPECS = st.builds(SampleSpec, PARAMS, IDS, NUMBERS, NUMBERS, st.integers(0, 127))
ROWS = st.builds(
    BatchRow,
    st.tuples(st.text(max_size=4), st.integers(0, 127)),
    NUMBERS,
    IDS,
    NUMBERS,
    st.lists(SPECS, max_size=3).map(tuple),
)
LOGPROBS = st.builds(
    TokenLogprob,
    IDS,
    st.floats(-50, 0),
    st.lists(st.tuples(IDS, st.floats(-50, 0)), max_size=2).map(tuple),
)


@given(st.lists(ROWS, max_size=5))
def test_a_batch_arrives_as_it_was(rows: list[BatchRow]):
    got = pickle.loads(pickle.dumps(Batch(tuple(rows))))
    assert len(got.rows) == len(rows)
    for arrived, sent in zip(got.rows, rows, strict=True):
        assert (arrived.key, arrived.start, arrived.samples) == (sent.key, sent.start, sent.samples)
        assert tuple(arrived.token_ids) == sent.token_ids
        assert tuple(arrived.block_ids) == sent.block_ids


@given(st.lists(st.lists(LOGPROBS, max_size=3).map(tuple), max_size=5).map(tuple))
def test_an_output_arrives_as_it_was(samples):
    assert pickle.loads(pickle.dumps(StepOutput(samples))).samples == samples
