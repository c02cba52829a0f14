"""Tensor ranks and pipeline stages of a family answer what transformers answers."""

from collections.abc import Callable
from typing import Any

import pytest
from test_families import FAMILIES, NEW_TOKENS, PROMPTS, TOLERANCE, prompts

from splitserve.core.config import EngineConfig
from splitserve.core.parallel import ParallelConfig
from splitserve.core.sampling import SamplingParams
from splitserve.core.ticket import new_epoch
from splitserve.engine.batch import Batch, BatchRow, SampleSpec
from splitserve.engine.executor import Executor

BLOCK_SIZE = 16
BLOCKS_EACH = -(-(max(PROMPTS) + NEW_TOKENS) // BLOCK_SIZE)
GREEDY = SamplingParams(temperature=0, logprobs=0)

NAMES = ["llama", "qwen3", "gpt2", "mixtral"]
"""Between them: grouped heads, norms of heads, learned positions, turned weights, experts."""

LAYOUTS = [(2, 1), (1, 2), (2, 2)]


async def answers(executor: Executor) -> list[tuple[list[int], list[float]]]:
    """Each prompt's tokens and their log-probabilities, all in one batch."""
    texts = prompts()
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in texts]
    for step in range(NEW_TOKENS):
        rows = []
        for row, text in enumerate(texts):
            start = len(text) - 1 if step else 0
            blocks = tuple(range(row * BLOCKS_EACH, (row + 1) * BLOCKS_EACH))
            spec = SampleSpec(GREEDY, len(text))
            rows.append(BatchRow((str(row), 0), tuple(text[start:]), start, blocks, (spec,)))
        output = await executor.execute(Batch(tuple(rows)))
        for text, (sample,), (tokens, logprobs) in zip(texts, output.samples, found, strict=True):
            assert sample is not None
            assert sample.logprob is not None
            text.append(sample.token_id)
            tokens.append(sample.token_id)
            logprobs.append(sample.logprob)
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
async def test_ranks_answer_as_transformers(
    write_checkpoint: Callable[..., Any], name: str, tensor: int, pipeline: int
) -> None:
    await assert_ranks_answer(write_checkpoint(**FAMILIES[name]), tensor, pipeline)


async def assert_ranks_answer(
    checkpoint: Any, tensor: int, pipeline: int, quantization: str = "none"
) -> None:
    config = EngineConfig(
        checkpoint.path,
        "float32",
        quantization,
        block_size=BLOCK_SIZE,
        num_blocks=BLOCKS_EACH * len(PROMPTS),
        parallel=ParallelConfig(tensor, pipeline),
        threads=1,
    )
    executor = await Executor.start(config, new_epoch())
    try:
        found = await answers(executor)
    finally:
        await executor.stop()
    for prompt, (tokens, logprobs) in zip(prompts(), found, strict=True):
        assert tokens == checkpoint.greedy(prompt, NEW_TOKENS)
        theirs = checkpoint.log_probs(prompt + tokens)[len(prompt) - 1 : -1]
        expected = [theirs[place, token].item() for place, token in enumerate(tokens)]
        assert logprobs == pytest.approx(expected, abs=TOLERANCE)
