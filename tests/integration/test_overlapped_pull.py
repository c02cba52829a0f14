"""Prompts that are pulled while they are computed give the same tokens and leave nothing."""

import random
from dataclasses import replace

import pytest
from clusters import NODE_OPTIONS, assert_settled, wait_until

from splitserve.client import Client
from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster

SAMPLING = SamplingParams(max_tokens=8, seed=5, temperature=1.0, ignore_eos=True)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # Layers, K and V, heads, size.


@pytest.fixture(scope="module")
def small_steps(tiny_model, no_leaks):
    """Prompts take many steps."""
    with LocalCluster(
        tiny_model,
        prefill_options={**NODE_OPTIONS, "block_size": 16, "max_tokens_per_batch": 24},
        decode_options={**NODE_OPTIONS, "block_size": 16},
    ) as cluster:
        yield cluster


@pytest.fixture
def client(small_steps):
    with small_steps.client() as client:
        yield client
        assert_settled(client)


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 512) for _ in range(length)]


def both_busy(client: Client) -> bool:
    """Whether a prompt is computed and pulled at once."""
    nodes = {node.info.kind.label: node for node in client.status().nodes}
    return bool(nodes["prefill"].running and nodes["decode"].importing)


@pytest.mark.parametrize(("length", "n"), [(4_000, 1), (3_999, 3), (25, 1), (48, 2), (24, 1)])
def test_tokens_and_bytes_are_those_of_a_prompt_pulled_as_a_whole(client, one_process, length, n):
    tokens = prompt(length, length)
    generation = client.generate(token_ids=tokens, sampling=replace(SAMPLING, n=n))
    if length > 1_000:
        wait_until(lambda: both_busy(client), 10, "the prompt is pulled while it is computed")
    answers = generation.completions()
    for index, answer in enumerate(answers):
        alone = replace(SAMPLING, seed=5 + index)
        assert list(answer.token_ids) == one_process.generate(tokens, alone).token_ids
    [moved] = [event.transfer for event in answers[0].lifetime.events if event.transfer]
    assert moved.size_bytes == length * TOKEN_BYTES, "each token once"


def test_a_beginning_that_is_there_already_is_not_pulled_early_either(client, one_process):
    tokens = prompt(2_000, 1)
    client.generate(token_ids=tokens[:1_000], sampling=SAMPLING).completion()
    answer = client.generate(token_ids=tokens, sampling=SAMPLING).completion()
    assert list(answer.token_ids) == one_process.generate(tokens, SAMPLING).token_ids
    [moved] = [event.transfer for event in answer.lifetime.events if event.transfer]
    assert moved.size_bytes == (2_000 - 1_000 // 16 * 16) * TOKEN_BYTES
    assert answer.usage.cached_tokens == 1_000 // 16 * 16


def test_a_client_that_leaves_while_its_prompt_is_computed_and_pulled_leaves_nothing(client):
    generation = client.generate(token_ids=prompt(8_000, 2), sampling=SAMPLING)
    wait_until(lambda: both_busy(client), 10, "the prompt is pulled while it is computed")
    generation.cancel()
    assert_settled(client)


def test_an_answer_of_one_token_leaves_nothing(client):
    short = replace(SAMPLING, max_tokens=1)
    generation = client.generate(token_ids=prompt(4_000, 3), sampling=short)
    wait_until(lambda: both_busy(client), 10, "the prompt is pulled while it is computed")
    assert len(generation.completion().token_ids) == 1


def test_many_at_once_are_all_right(client, one_process):
    prompts = [prompt(200 + 37 * index, 10 + index) for index in range(12)]
    running = [client.generate(token_ids=tokens, sampling=SAMPLING) for tokens in prompts]
    for tokens, generation in zip(prompts, running, strict=True):
        answer = generation.completion()
        assert list(answer.token_ids) == one_process.generate(tokens, SAMPLING).token_ids
