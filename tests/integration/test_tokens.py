"""Tokens, log-probabilities and usage of prefill + decode are those of one process."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitserve.client import AsyncClient
from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.request import FinishReason
from splitserve.core.sampling import SamplingParams

WHOLE_LIFE = [
    LifetimeEventKind.ISSUED,
    LifetimeEventKind.PREFILL_BEGIN,
    LifetimeEventKind.PREFILL_END,
    LifetimeEventKind.MIGRATION_BEGIN,
    LifetimeEventKind.MIGRATION_END,
    LifetimeEventKind.DECODE_BEGIN,
    LifetimeEventKind.DECODE_END,
    LifetimeEventKind.FINISHED,
]
PREFILL_ONLY = [kind for kind in WHOLE_LIFE if kind not in WHOLE_LIFE[3:7]]


def prompt(length: int, seed: int = 1) -> list[int]:
    return [3 + (seed * 7919 + 31 * i * i) % 500 for i in range(length)]


SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=24, seed=11, ignore_eos=True),
    "filtered": SamplingParams(
        max_tokens=24, seed=5, temperature=0.7, top_p=0.8, top_k=40, min_p=0.01, ignore_eos=True
    ),
    "penalised": SamplingParams(
        max_tokens=24, temperature=0, repetition_penalty=1.3, presence_penalty=0.5,
        frequency_penalty=0.3, ignore_eos=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("length", [1, 16, 33, 700])
def test_fault_31_tokens_equal_those_of_one_process(client, one_process, name, length):
    tokens, sampling = prompt(length), SAMPLINGS[name]
    answer = client.generate(token_ids=tokens, sampling=sampling).completion()
    judged = one_process.generate(tokens, sampling)
    assert list(answer.token_ids) == judged.token_ids
    assert answer.finish_reason is judged.finish_reason


def test_faults_29_36_log_probabilities_and_usage_equal_those_of_one_process(client, one_process):
    tokens = prompt(50)
    sampling = SamplingParams(max_tokens=16, temperature=0, logprobs=3, ignore_eos=True)
    answer = client.generate(token_ids=tokens, sampling=sampling).completion()
    judged = one_process.generate(tokens, sampling)
    assert [entry.token_id for entry in answer.logprobs] == judged.token_ids
    for ours, theirs in zip(answer.logprobs, judged.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-4)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (50, 16)


async def test_the_same_request_gives_the_same_tokens_alone_and_in_a_batch_of_16(cluster):
    sampling = SamplingParams(max_tokens=32, seed=77, ignore_eos=True)
    async with AsyncClient(cluster.address) as client:
        alone = await client.generate(token_ids=prompt(40), sampling=sampling).completion()
        others = [
            client.generate(
                token_ids=prompt(10 + 9 * i, seed=i),
                sampling=SamplingParams(max_tokens=40, seed=i, ignore_eos=True),
            ).completion()
            for i in range(15)
        ]
        together = client.generate(token_ids=prompt(40), sampling=sampling).completion()
        shared, *_ = await asyncio.gather(together, *others)
    assert shared.token_ids == alone.token_ids


def test_fault_27_max_tokens_1_is_one_token_and_no_decode_node(client):
    sampling = SamplingParams(max_tokens=1, temperature=0)
    answer = client.generate(token_ids=prompt(20), sampling=sampling).completion()
    assert len(answer.token_ids) == 1
    assert answer.finish_reason is FinishReason.LENGTH
    assert [event.kind for event in answer.lifetime.events] == PREFILL_ONLY


def test_fault_28_an_answer_that_begins_with_eos_is_empty_and_touches_no_decode_node(client):
    first = client.generate(
        token_ids=prompt(20), sampling=SamplingParams(max_tokens=1, temperature=0)
    ).completion()
    sampling = SamplingParams(max_tokens=9, temperature=0, stop_token_ids=first.token_ids)
    answer = client.generate(token_ids=prompt(20), sampling=sampling).completion()
    assert answer.token_ids == first.token_ids
    assert answer.finish_reason is FinishReason.STOP
    assert [event.kind for event in answer.lifetime.events] == PREFILL_ONLY


def test_eos_ends_an_answer_unless_it_is_ignored(client, one_process):
    # A seed whose answer meets the end-of-sequence token, found with the judge.
    for seed in range(400):
        sampling = SamplingParams(max_tokens=60, seed=seed)
        judged = one_process.generate(prompt(9), sampling)
        if judged.finish_reason is FinishReason.STOP and len(judged.token_ids) > 2:
            break
    answer = client.generate(token_ids=prompt(9), sampling=sampling).completion()
    assert list(answer.token_ids) == judged.token_ids
    assert answer.finish_reason is FinishReason.STOP
    ignoring = SamplingParams(max_tokens=60, seed=seed, ignore_eos=True)
    longer = client.generate(token_ids=prompt(9), sampling=ignoring).completion()
    assert len(longer.token_ids) == 60
    assert longer.token_ids[: len(answer.token_ids)] == answer.token_ids


def test_a_lifetime_has_every_event_in_order_and_says_how_the_kv_moved(client):
    generation = client.generate(token_ids=prompt(34)[1:], sampling=SAMPLINGS["greedy"])
    lifetime = generation.completion().lifetime
    assert [event.kind for event in lifetime.events] == WHOLE_LIFE
    times = [event.time_ns for event in lifetime.events]
    assert times == sorted(times)
    [transfer] = [event.transfer for event in lifetime.events if event.transfer]
    assert transfer.transport == "shm"
    assert transfer.size_bytes == 33 * 2 * 2 * 2 * 16 * 4, "tokens, layers, K and V, heads, size"
    assert lifetime.outcome == "length"
    assert client.lifetime(lifetime.request_id).events == lifetime.events


def test_fault_37_time_to_first_token_runs_from_receipt_to_the_first_bytes_written(client):
    lifetime = client.generate(token_ids=prompt(300), sampling=SAMPLINGS["greedy"]).completion()
    events = {event.kind: event.time_ns for event in lifetime.lifetime.events}
    prefilled = events[LifetimeEventKind.PREFILL_END] - events[LifetimeEventKind.ISSUED]
    whole = events[LifetimeEventKind.FINISHED] - events[LifetimeEventKind.ISSUED]
    assert prefilled * 0.9 < lifetime.lifetime.time_to_first_token_ns < whole


def test_fault_38_the_router_counts_a_prompt_as_its_node_does(client):
    def computed() -> int:
        return sum(
            node.computed_tokens_total
            for node in client.status().nodes
            if node.info.kind.label == "prefill"
        )

    before = computed()
    chat = [{"role": "user", "content": "How many ships pass in the morning? 灯塔 🙂"}]
    answer = client.generate(chat=chat, sampling=SamplingParams(max_tokens=1)).completion()
    assert answer.usage.prompt_tokens == computed() - before > 10


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    length=st.integers(1, 600),
    max_tokens=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
)
def test_any_request_equals_one_process(client, one_process, length, max_tokens, seed, temperature):
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature)
    tokens = prompt(length, seed)
    answer = client.generate(token_ids=tokens, sampling=sampling).completion()
    assert list(answer.token_ids) == one_process.generate(tokens, sampling).token_ids
