"""What does rounding cost? The perplexity of one text, in float32 and in what is faster.

The text, `quality_text.txt`, is the beginning of Herman Melville's Moby-Dick (1851), which is in
the public domain. A model may know it by heart: figures are for comparing, not for a ranking.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.machine import Machine
from bench.report import Report
from splitserve.model.config import ModelConfig, resolve_dtype
from splitserve.model.decoder import Decoder, ModelInput
from splitserve.model.loader import load_decoder
from splitserve.model.size import weight_bytes
from splitserve.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("quality_text.txt")
CHUNK_TOKENS = 256
"""Computed at once; logits of all of them are wanted, and take memory."""

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Score:
    """How one way to compute reads the text.

    Attributes:
        dtype: Data type of activations and KV.
        quantization: How weights are kept.
        weight_bytes: What they take.
        perplexity: e to the mean of what each token was a surprise, in nats; smaller is better.
        same: Share of places where the likeliest token is that of the first way.
    """

    dtype: str
    quantization: str
    weight_bytes: int
    perplexity: float
    same: float


@dataclass(frozen=True, slots=True)
class Scores:
    """Ways to compute, the most exact one first."""

    scores: Sequence[Score]

    def as_json(self) -> dict[str, Any]:
        """See `Findings`."""
        return {"scores": [asdict(score) for score in self.scores]}

    def table(self, coloured: bool) -> Table:
        """See `Findings`."""
        table = Table(box=None, pad_edge=False)
        for heading in ("dtype", "quantization"):
            table.add_column(heading)
        for heading in ("weights, MB", "perplexity", "above the first", "same likeliest token"):
            table.add_column(heading, justify="right")
        for one in self.scores:
            table.add_row(
                one.dtype,
                one.quantization,
                f"{one.weight_bytes / 1e6:.0f}",
                f"{one.perplexity:.3f}",
                f"{one.perplexity / self.scores[0].perplexity - 1:+.2%}",
                f"{one.same:.1%}",
            )
        return table


async def measure(model: Path, threads: int) -> Report:
    """Answers the question."""
    torch.set_num_threads(threads)
    config = ModelConfig.from_dir(model)
    ids = Tokenizer.from_dir(model).encode(TEXT.read_text("utf-8"), add_special_tokens=True)
    ids = ids[: config.max_position_embeddings]
    auto = resolve_dtype("auto", config)
    ways = dict.fromkeys([("float32", "none"), (auto, "none"), ("float32", "int8"), (auto, "int8")])
    scores: list[Score] = []
    exact = torch.empty(0)
    for dtype, quantization in ways:
        decoder = load_decoder(config, model, dtype, quantization=quantization)
        perplexity, likeliest = read(decoder, config, ids)
        exact = exact if scores else likeliest
        same = float((likeliest == exact).float().mean())
        scores.append(Score(dtype, quantization, weight_bytes(decoder), perplexity, same))
    return Report(
        name="quality",
        title="perplexity of the beginning of Moby-Dick",
        machine=Machine.here("torch"),
        settings={"model": config.name, "threads": threads, "tokens": len(ids)},
        findings=Scores(scores),
    )


def read(decoder: Decoder, config: ModelConfig, ids: Sequence[int]) -> tuple[float, torch.Tensor]:
    """The perplexity of all tokens but the first, and the likeliest token in each's place."""
    blocks = list(range(-(-len(ids) // BLOCK_SIZE)))
    shape = (len(blocks), config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    cache = torch.zeros(shape, dtype=decoder.dtype)
    surprise, likeliest = 0.0, []
    for begin in range(0, len(ids) - 1, CHUNK_TOKENS):
        chunk = ids[begin : min(begin + CHUNK_TOKENS, len(ids) - 1)]
        step = ModelInput.from_rows([(chunk, begin, blocks, True)], BLOCK_SIZE)
        logits = decoder.forward(replace(step, logits_of=torch.arange(len(chunk))), cache)
        target = torch.tensor(ids[begin + 1 : begin + 1 + len(chunk)])
        surprise += float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
        likeliest.append(logits.argmax(-1))
    return math.exp(surprise / (len(ids) - 1)), torch.cat(likeliest)
