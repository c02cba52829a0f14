"""A decoder over paged KV: one step's tokens in, logits out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from splitserve.model.attention import Attention, Row, Step
from splitserve.model.layers import Embedding, Head, Norm


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What one step computes, as tensors.

    Attributes:
        rows: Each request's share.
        token_ids: All rows' tokens, row after row: ``[T]``.
        positions: Their positions: ``[T]``.
        block_of: Blocks that take their KV: ``[T]``.
        offset_of: Their places in those blocks: ``[T]``.
        begun_blocks: Blocks that this step begins and does not fill.
        logits_of: Indexes of the tokens whose logits are wanted: the last ones of some rows.
    """

    rows: tuple[Row, ...]
    token_ids: Tensor
    positions: Tensor
    block_of: Tensor
    offset_of: Tensor
    begun_blocks: Tensor
    logits_of: Tensor

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[tuple[Sequence[int], int, Sequence[int], bool]],
        block_size: int,
    ) -> "ModelInput":
        """Lays a step out.

        Args:
            rows: For each request its tokens to compute, the position of the first of them, its
                blocks in token order, and whether the last token's logits are wanted.
            block_size: Tokens in a block.
        """
        counts = np.array([len(token_ids) for token_ids, *_ in rows], dtype=np.int64)
        starts = np.array([start for _, start, *_ in rows], dtype=np.int64)
        blocks = [np.asarray(block_ids, dtype=np.int64) for _, _, block_ids, _ in rows]
        lengths, sizes = starts + counts, np.array([len(ids) for ids in blocks], dtype=np.int64)
        assert (counts > 0).all(), "a row computes at least one token"
        assert (lengths <= sizes * block_size).all(), "a row's tokens fit its blocks"
        begins = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) + np.repeat(starts - begins, counts)
        # Where each row's blocks begin among all of them, laid one after the other.
        tables, table_begins = np.concatenate(blocks), np.cumsum(sizes) - sizes
        last_blocks = (lengths - 1) // block_size
        begun = (lengths % block_size != 0) & (last_blocks * block_size >= starts)
        wanted = np.array([wants_logits for *_, wants_logits in rows], dtype=bool)
        return cls(
            rows=tuple(map(Row, begins.tolist(), counts.tolist(), starts.tolist(), blocks)),
            token_ids=torch.from_numpy(
                np.concatenate([np.asarray(ids, dtype=np.int64) for ids, *_ in rows])
            ),
            positions=torch.from_numpy(positions),
            block_of=torch.from_numpy(
                tables[np.repeat(table_begins, counts) + positions // block_size]
            ),
            offset_of=torch.from_numpy(positions % block_size),
            begun_blocks=torch.from_numpy(tables[(table_begins + last_blocks)[begun]]),
            logits_of=torch.from_numpy((begins + counts - 1)[wanted]),
        )


class Layer(Protocol):
    """One decoder layer."""

    def __call__(self, hidden: Tensor, step: Step, index: int) -> Tensor:
        """``[T, E]`` to ``[T, E]``, as the cache's layer of this index."""


class TokenMLP(Protocol):
    """Works on each token by itself."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[T, E]`` to ``[T, E]``, added to ``residual`` if there is one."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each behind a norm and beside a residual.

    Attributes:
        attention_norm: Before the attention.
        attention: Mixes tokens.
        mlp_norm: Before the MLP.
        mlp: Works on each token by itself.
    """

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: TokenMLP

    def __call__(self, hidden: Tensor, step: Step, index: int) -> Tensor:
        """See `Layer`."""
        hidden = self.attention(self.attention_norm(hidden), step, index, hidden)
        return self.mlp(self.mlp_norm(hidden), hidden)


class Decoder:
    """A rank's part of a model: some layers, and at either end of them what is before and behind.

    Args:
        embedding: Before the first layer; None on a stage that begins later.
        layers: This rank's, the first one first.
        norm: Before the head; None on a stage that ends earlier.
        head: Hidden states to logits; None as well.
        dtype: Data type of weights, activations and KV.
    """

    def __init__(
        self,
        embedding: Embedding | None,
        layers: Sequence[Layer],
        norm: Norm | None,
        head: Head | None,
        dtype: torch.dtype,
    ) -> None:
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self.dtype = dtype

    @torch.inference_mode()
    def forward(
        self, model_input: ModelInput, cache: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """Computes a step: writes all its tokens' KV, and what comes behind the layers.

        Args:
            model_input: The step.
            cache: This rank's whole KV, ``[N, L, 2, K, S, D]``, contiguous, in `dtype`.
            hidden: What the stage before made of the tokens, ``[T, E]``; None on the first stage.

        Returns:
            Hidden states ``[T, E]`` for the next stage; on the last one float32 logits
            ``[len(logits_of), V]`` on the first tensor rank and ``[0, V]`` on the others.
        """
        if model_input.begun_blocks.numel():
            # Padding reads a last block to its end. Its mask makes the weights zero, but zero
            # times a NaN left by somebody else is NaN.
            cache.index_fill_(0, model_input.begun_blocks, 0)
        step = Step(
            model_input.rows,
            model_input.positions,
            model_input.block_of,
            model_input.offset_of,
            cache,
        )
        if hidden is None:
            assert self._embedding is not None, "the first stage embeds"
            hidden = self._embedding(model_input.token_ids, model_input.positions)
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, step, index)
        if self._norm is None or self._head is None:
            return hidden
        return self._head(self._norm(hidden.index_select(0, model_input.logits_of)))
