"""Any layout pulls from any other; the answers are those of one rank."""

import random

import pytest
from clusters import NODE_OPTIONS, assert_settled
from tiny_model import write_tiny_model

from splitserve.core.sampling import SamplingParams
from splitserve.local import LocalCluster

MODEL = {"layers": 6, "heads": 12, "kv_heads": 6, "hidden": 96, "head_dim": 16}
FEW_KV_HEADS = MODEL | {"heads": 8, "kv_heads": 2}
ONE_KV_HEAD = MODEL | {"kv_heads": 1}

PROMPTS = [[random.Random(n).randrange(3, 500) for _ in range(n)] for n in (1, 15, 16, 47, 130)]


def parallel(tensor: int, pipeline: int) -> dict[str, int]:
    return {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A model and what one process answers."""
    from one_process import OneProcess

    known = {}

    def judge(shape: dict[str, int], quantization: str = "none"):
        key = (*shape.items(), quantization)
        if key not in known:
            path = write_tiny_model(tmp_path_factory.mktemp("layouts") / "tiny", **shape)
            alone = OneProcess(path, quantization=quantization)
            answers = [alone.generate(prompt, sampling(n)) for n, prompt in enumerate(PROMPTS)]
            known[key] = (path, answers)
        return known[key]

    return judge


def sampling(number: int) -> SamplingParams:
    """Some greedy, some drawn."""
    return SamplingParams(max_tokens=12, seed=number, temperature=number % 2, logprobs=1)


@pytest.mark.parametrize(
    ("shape", "prefill", "decode", "blocks"),
    [
        pytest.param(MODEL, (1, 1), (2, 1), (16, 32), id="tensor-1-to-2"),
        pytest.param(MODEL, (2, 1), (1, 1), (32, 8), id="tensor-2-to-1"),
        pytest.param(MODEL, (2, 1), (3, 1), (16, 16), id="tensor-2-to-3"),
        pytest.param(MODEL, (1, 1), (1, 2), (16, 16), id="pipeline-1-to-2"),
        pytest.param(MODEL, (1, 2), (1, 1), (16, 16), id="pipeline-2-to-1"),
        pytest.param(MODEL, (1, 3), (1, 2), (16, 16), id="pipeline-3-to-2"),
        pytest.param(MODEL, (2, 1), (1, 2), (16, 32), id="tensor-2-to-pipeline-2"),
        pytest.param(MODEL, (2, 2), (1, 1), (16, 16), id="both-to-one"),
        pytest.param(FEW_KV_HEADS, (4, 1), (1, 1), (16, 16), id="replicated-heads-to-one"),
        pytest.param(FEW_KV_HEADS, (1, 1), (4, 1), (16, 16), id="one-to-replicated-heads"),
        pytest.param(ONE_KV_HEAD, (2, 1), (1, 1), (16, 16), id="fault_10-more-ranks-than-kv-heads"),
    ],
)
def test_answers_are_those_of_one_rank(judge, no_leaks, shape, prefill, decode, blocks):
    assert_answers(judge(shape), shape, prefill, decode, blocks)


def test_answers_of_8_bit_weights_are_those_of_one_rank(judge, no_leaks):
    shares = (MODEL, (1, 1), (2, 2), (16, 32))
    assert_answers(judge(MODEL, "int8"), *shares, {"quantization": "int8"})


def assert_answers(judged, shape, prefill, decode, blocks, options=NODE_OPTIONS):
    model, expected = judged
    both = NODE_OPTIONS | options
    with (
        LocalCluster(
            model,
            prefill_options=both
            | parallel(*prefill)
            | {"block_size": blocks[0], "max_tokens_per_batch": 50, "num_blocks": 64},
            decode_options=both | parallel(*decode) | {"block_size": blocks[1], "num_blocks": 64},
        ) as cluster,
        cluster.client() as client,
    ):
        streams = [
            client.generate(token_ids=prompt, sampling=sampling(number))
            for number, prompt in enumerate(PROMPTS)
        ]
        for stream, answer in zip(streams, expected, strict=True):
            deltas = list(stream)
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == answer.token_ids
        nodes = sorted((node.info for node in client.status().nodes), key=lambda i: i.kind.value)
        for info, (tensor, pipeline) in zip(nodes, (prefill, decode), strict=True):
            assert len(info.ranks) == tensor * pipeline
            kv_heads = max(shape["kv_heads"], tensor)  # Some are on several ranks.
            token_bytes = 2 * 4 * shape["layers"] * kv_heads * shape["head_dim"]
            assert sum(r.kv_bytes for r in info.ranks) == 64 * info.block_size * token_bytes
            assert all(rank.weight_bytes > 0 for rank in info.ranks)
        assert_settled(client)
