"""KV that earlier requests left is found again, and changes no token."""

import random

import pytest
from clusters import NODE_OPTIONS, assert_settled
from one_process import OneProcess
from tiny_model import write_tiny_model

from splitserve.client import Client
from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster

NUM_BLOCKS = 40
"""Of 16 tokens on the prefill node: room for one conversation of ten turns and little more."""


@pytest.fixture(scope="module")
def model(tmp_path_factory, no_leaks):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def judge(model):
    return OneProcess(model)


@pytest.fixture(scope="module")
def small_cluster(model):
    with LocalCluster(
        model,
        prefill_options={
            **NODE_OPTIONS,
            "block_size": 16,
            "num_blocks": NUM_BLOCKS,
            "max_tokens_per_batch": 64,
        },
        decode_options={**NODE_OPTIONS, "block_size": 8, "num_blocks": 2 * NUM_BLOCKS},
    ) as cluster:
        yield cluster  # fmt: skip


@pytest.fixture
def client(small_cluster):
    with small_cluster.client() as client:
        yield client
        assert_settled(client)


def totals(client: Client) -> dict[str, tuple[int, int]]:
    """Computed and cached tokens of the prefill and of the decode node, by label."""
    return {
        node.info.kind.label: (node.computed_tokens_total, node.cached_tokens_total)
        for node in client.status().nodes
    }


def moved_bytes(answer) -> int:
    return sum(event.transfer.size_bytes for event in answer.lifetime.events if event.transfer)


def test_of_ten_turns_each_computes_and_moves_only_what_is_new(client, judge):
    source = random.Random(1)
    history: list[int] = []
    given = 0  # Tokens of the last prompt.
    token_bytes = set()
    for turn in range(10):
        history += [source.randrange(3, 512) for _ in range(source.randrange(5, 40))]
        sampling = SamplingParams(max_tokens=10, seed=turn, ignore_eos=True)
        before = totals(client)["prefill"][0]
        answer = client.generate(token_ids=history, sampling=sampling).completion()
        assert list(answer.token_ids) == judge.generate(history, sampling).token_ids
        known = given // 16 * 16
        assert totals(client)["prefill"][0] - before == len(history) - known
        assert answer.usage.cached_tokens == known
        # The decode node has the last answer too, but for its last token.
        there = (given + 9) // 8 * 8 if turn else 0
        token_bytes.add(moved_bytes(answer) / (len(history) - there))
        given = len(history)
        history += answer.token_ids
    assert len(token_bytes) == 1, "every token moved has the same size"


def test_under_pressure_old_prefixes_give_way_and_every_answer_is_right(client, judge):
    source = random.Random(2)
    prompts = [[source.randrange(3, 512) for _ in range(150)] for _ in range(6)]
    sampling = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    expected = [judge.generate(prompt, sampling).token_ids for prompt in prompts]
    cached = 0
    # Six prompts of ten blocks in forty: of those used lately something is always left.
    for index in [0, 1, 0, 2, 3, 3, 4, 5, 0, 5, 4, 4, 1, 2]:
        answer = client.generate(token_ids=prompts[index], sampling=sampling).completion()
        assert list(answer.token_ids) == expected[index]
        cached += answer.usage.cached_tokens
        assert_settled(client)
    assert 144 * 4 <= cached < 144 * 9


def test_requests_at_once_share_what_is_there(client, judge):
    source = random.Random(4)
    common = [source.randrange(3, 512) for _ in range(64)]
    client.generate(token_ids=common, sampling=SamplingParams(max_tokens=2, seed=0)).completion()
    prompts = [[*common, *(source.randrange(3, 512) for _ in range(20))] for _ in range(6)]
    samplings = [SamplingParams(max_tokens=12, seed=n, n=1 + n % 2) for n in range(6)]
    running = [
        client.generate(token_ids=prompt, sampling=sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    running[3].cancel()
    for index, generation in enumerate(running):
        if index == 3:
            continue
        for number, answer in enumerate(generation.completions()):
            alone = SamplingParams(max_tokens=12, seed=index + number)
            assert list(answer.token_ids) == judge.generate(prompts[index], alone).token_ids
            assert answer.usage.cached_tokens == 64
