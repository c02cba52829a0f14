"""A request that is given up, in any phase, holds nothing a moment later."""

import time

import pytest
from clusters import assert_settled, wait_until

from splitserve.client import Client
from splitserve.core.errors import DeadlineExceededError, NotFoundError
from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.request import FinishReason
from splitserve.core.sampling import SamplingParams

LONG = SamplingParams(max_tokens=5000, seed=1, ignore_eos=True)


def node(client: Client, kind: str):
    [found] = [node for node in client.status().nodes if node.info.kind.label == kind]
    return found


def test_fault_14_leaving_before_the_first_token_stops_prefill_at_the_next_chunk(client):
    generation = client.generate(token_ids=[5] * 30_000, sampling=SamplingParams(max_tokens=9))
    wait_until(lambda: node(client, "prefill").running == 1, 10, "the prompt began")
    before = node(client, "prefill").computed_tokens_total
    generation.cancel()
    wait_until(lambda: node(client, "prefill").running == 0, 2, "the prompt was dropped")
    assert node(client, "prefill").computed_tokens_total - before < 5_000
    assert_settled(client)


def test_leaving_while_tokens_stream_frees_the_decode_node(client):
    generation = client.generate(token_ids=[5] * 50, sampling=LONG)
    for _ in range(5):
        next(generation)
    assert node(client, "decode").blocks_owned > 0
    generation.cancel()
    assert_settled(client)


def test_a_deadline_ends_a_request_with_its_status(client):
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        client.generate(token_ids=[5] * 50, sampling=LONG, timeout=0.5).completion()
    assert time.monotonic() - started < 2.0
    assert_settled(client)


def test_an_aborted_request_ends_with_its_tokens_and_reason(client):
    generation = client.generate(token_ids=[5] * 50, sampling=LONG, request_id="to-abort")
    first = next(generation)
    client.abort("to-abort")
    rest = list(generation)
    assert rest[-1].finish_reason is FinishReason.ABORTED
    tokens = [*first.token_ids, *(token for delta in rest for token in delta.token_ids)]
    assert rest[-1].usage.completion_tokens == len(tokens) < 5000
    lifetime = client.lifetime("to-abort")
    assert lifetime.outcome == "aborted"
    assert lifetime.events[-1].kind is LifetimeEventKind.FINISHED
    with pytest.raises(NotFoundError):
        client.abort("to-abort")


def test_fault_13_many_requests_given_up_in_every_phase_leave_nothing(client):
    for round_number in range(60):
        length = (1, 40, 900)[round_number % 3]
        generation = client.generate(token_ids=[5] * length, sampling=LONG)
        for _ in range(round_number % 4):
            next(generation)
        generation.cancel()
    assert_settled(client)
    answer = client.generate("still there", sampling=SamplingParams(max_tokens=3)).completion()
    assert answer.token_ids
