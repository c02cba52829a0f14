"""A decoder over paged KV: one step's tokens in, logits out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
        laid: list[Row] = []
        tokens: list[int] = []
        positions: list[int] = []
        block_of: list[int] = []
        begun: list[int] = []
        wanted: list[int] = []
        for token_ids, start, block_ids, wants_logits in rows:
            row = Row(len(tokens), len(token_ids), start, tuple(block_ids))
            assert row.count > 0, "a row computes at least one token"
            assert row.length <= len(block_ids) * block_size, "a row's tokens fit its blocks"
            laid.append(row)
            tokens += token_ids
            positions += range(start, row.length)
            block_of += [block_ids[place // block_size] for place in range(start, row.length)]
            last_block = (row.length - 1) // block_size
            if row.length % block_size and last_block * block_size >= start:
                begun.append(block_ids[last_block])
            if wants_logits:
                wanted.append(len(tokens) - 1)
        position = torch.tensor(positions, dtype=torch.int64)
        return cls(
            rows=tuple(laid),
            token_ids=torch.tensor(tokens, dtype=torch.int64),
            positions=position,
            block_of=torch.tensor(block_of, dtype=torch.int64),
            offset_of=position % block_size,
            begun_blocks=torch.tensor(begun, dtype=torch.int64),
            logits_of=torch.tensor(wanted, dtype=torch.int64),
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
