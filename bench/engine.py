"""How fast is our engine? Against transformers' own ``generate``: same model, threads, dtype."""

import importlib.util
import random
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Protocol

from safetensors import safe_open

from bench.child import Child
from bench.machine import Machine, read_bandwidth
from bench.node_engine import NodeEngine
from bench.report import Comparison, Comparisons, Report, Skipped
from bench.rounds import take_turns
from splitserve.core.config import EngineConfig
from splitserve.kv.layout import DTYPE_BYTES
from splitserve.model.config import ModelConfig, resolve_dtype

PROMPT_LENGTHS = (128, 512, 2048)
BATCH_SIZES = (1, 4, 16)
CONTEXT = 256
NEW_TOKENS = 32
WARM_UP_TOKENS = 2

PREFILL_RATIO = 0.9
DECODE_RATIOS = {1: 1.5, 4: 1.5, 16: 2.5}

EMBEDDING = "model.embed_tokens.weight"

Prompts = Sequence[Sequence[int]]


class Side(Protocol):
    """Both sides do the same three things."""

    async def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token."""

    async def hold(self, prompts: Prompts, count: int) -> None:
        """Computes prompts that `decode` continues by up to ``count`` tokens each."""

    async def decode(self, count: int) -> float:
        """Seconds that ``count`` tokens for each held prompt take, all in one batch."""


class Peer:
    """transformers, in its own process. Nothing else runs while it is asked.

    Args:
        child: The process.
    """

    def __init__(self, child: Child) -> None:
        self._child = child

    async def prefill(self, prompt: Sequence[int]) -> float:
        """See `Side`."""
        return float(self._child.ask(what="prefill", prompt=prompt))

    async def hold(self, prompts: Prompts, count: int) -> None:
        """See `Side`."""
        self._child.ask(what="hold", prompts=prompts, count=count)

    async def decode(self, count: int) -> float:
        """See `Side`."""
        return float(self._child.ask(what="decode", count=count))


async def measure(model: Path, dtype: str, quantization: str, threads: int, rounds: int) -> Report:
    """Answers the question.

    Raises:
        Skipped: There is nobody to compare with.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed: pip install 'splitserve[import]'")
    machine = Machine.here("torch", "transformers")
    config = ModelConfig.from_dir(model)
    dtype = resolve_dtype(dtype, config)
    bandwidth = read_bandwidth(threads)
    arguments = (str(model), dtype, str(threads))
    with Child("bench.generate_peer", *arguments, threads=threads) as child:
        ours = EngineConfig(model, dtype, quantization, threads=threads)
        async with NodeEngine.open(ours) as engine:
            peer = Peer(child)
            # Once unmeasured: memory is touched, kernels are chosen.
            for side in (engine, peer):
                await side.prefill(_prompts(-1, 1, PROMPT_LENGTHS[0], config.vocab_size)[0])
            comparisons = [
                *[await _prefill(engine, peer, n, config, rounds) for n in PROMPT_LENGTHS],
                *[await _decode(engine, peer, n, config, rounds) for n in BATCH_SIZES],
            ]
    # Whoever disturbed one of the two makes the memory look slower than it is.
    bandwidth = max(bandwidth, read_bandwidth(threads))
    step_s = _step_bytes(model, config, dtype, quantization) / bandwidth
    peer_step_s = _step_bytes(model, config, dtype, "none") / bandwidth
    alone = next(one for one in comparisons if one.case == _decode_case(1))
    return Report(
        name="engine" if quantization == "none" else f"engine-{quantization}",
        title="one worker as a node drives it, beside transformers' generate",
        machine=machine,
        settings={
            "model": config.name,
            "dtype": dtype,
            "quantization": quantization,
            "threads": threads,
            "rounds": rounds,
        },
        findings=Comparisons("transformers", comparisons),
        notes={
            "memory": f"{bandwidth / 1e9:.1f} GB/s read; our weights once through it take "
            f"{step_s * 1e3:.1f} ms, so batch 1 cannot be faster than {1 / step_s:.0f} tokens/s",
            "share of that limit": f"splitserve {alone.rounds.our_median * step_s:.0%}, "
            f"transformers, of its own, {alone.rounds.peer_median * peer_step_s:.0%}",
        },
    )


async def _prefill(
    ours: Side, peer: Side, length: int, config: ModelConfig, rounds: int
) -> Comparison:
    async def rate(side: Side, number: int) -> float:
        # Other tokens every round: nobody can have them cached.
        [prompt] = _prompts(number, 1, length, config.vocab_size)
        return length / await side.prefill(prompt)

    figures = await take_turns(partial(rate, ours), partial(rate, peer), rounds)
    return Comparison(f"prefill, {length:,} tokens", "tokens/s", figures, PREFILL_RATIO)


async def _decode(
    ours: Side, peer: Side, batch: int, config: ModelConfig, rounds: int
) -> Comparison:
    async def rate(side: Side, number: int) -> float:
        return batch * NEW_TOKENS / await side.decode(NEW_TOKENS)

    for side in (ours, peer):
        await side.hold(_prompts(0, batch, CONTEXT, config.vocab_size), NEW_TOKENS)
        await side.decode(WARM_UP_TOKENS)
    figures = await take_turns(partial(rate, ours), partial(rate, peer), rounds)
    return Comparison(_decode_case(batch), "tokens/s", figures, DECODE_RATIOS[batch])


def _decode_case(batch: int) -> str:
    return f"decode, batch {batch}, {CONTEXT} + {NEW_TOKENS} tokens"


def _prompts(seed: int, count: int, length: int, vocab_size: int) -> Prompts:
    """Random tokens, the same for both sides."""
    source = random.Random(f"{seed} {count} {length}")
    return [[source.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def _step_bytes(model: Path, config: ModelConfig, dtype: str, quantization: str) -> int:
    """Bytes of weights that a step of one token reads."""
    size = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118  (no mapping)
                # A tied table is also the head, and read whole; else a step reads one row.
                if name != EMBEDDING or config.tie_word_embeddings:
                    shape = weights.get_slice(name).get_shape()
                    rounded = quantization == "int8" and len(shape) > 1
                    size += prod(shape) * (1 if rounded else DTYPE_BYTES[dtype])
    return size
