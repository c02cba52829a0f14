"""Attention over paged KV.

A step mixes rows of two sorts, and each is computed the way that is fast for it. Rows of one
token (decode) are batched: a native kernel reads their blocks where they lie. Without it they are
gathered, padded to the longest of a group, and the query heads that share a KV head become the
rows of one matrix product. Rows of many tokens
(a chunk of a prompt) go one by one: the chunk attends to itself causally without a look at the
cache, to what came before it without a mask, and the two results are joined by their weights.

Whatever depends only on the step and not on the layer is in `AttentionPlan`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from splitserve import native
from splitserve.model.layers import Projection, RMSNorm, softcapped
from splitserve.model.rope import Rope, Rotation

_MASKED = float("-inf")

# Shorter rows than this share of a group's longest would mostly read padding.
_GROUP_FILL = 0.5


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step.

    Attributes:
        begin: Index of its first token among the step's.
        count: Tokens to compute.
        start: Position of the first of them; KV of all earlier ones is in the cache.
        block_ids: Enough blocks for ``start + count`` tokens, in token order.
    """

    begin: int
    count: int
    start: int
    block_ids: NDArray[np.int64]

    @property
    def length(self) -> int:
        """Tokens with KV after this step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class _Gather:
    """Which parts of the cache to read.

    Attributes:
        index: Rows of `_Pages.blocks` for ``[2, B, K, blocks]``, flat.
        shape: ``(2, B, K, tokens, D)``.
    """

    index: Tensor
    shape: tuple[int, int, int, int, int]

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, ``[B, K, tokens, D]`` each."""
        keys, values = blocks.index_select(0, self.index).view(self.shape).unbind(0)
        return keys, values


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows of one token, alike in length.

    Attributes:
        tokens: Their indexes among the step's tokens; None if they are all of them, in order.
        gather: Their KV, padded to the longest.
        mask: What to add to scores: ``[B * K, H / K, tokens]``.
    """

    tokens: Tensor | None
    gather: _Gather
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Singles:
    """Rows of one token, for the native kernel.

    Attributes:
        tokens: Their indexes among the step's tokens: ``[rows]``.
        table: Their blocks in token order, padded: ``[rows, blocks]``.
        begins: First token that each one sees: ``[rows]``.
        ends: One past the last: ``[rows]``.
    """

    tokens: Tensor
    table: Tensor
    begins: Tensor
    ends: Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens.

    Attributes:
        begin: First of its tokens among the step's.
        end: One past the last.
        past: KV to read from the cache; None if there is none before it.
        past_begin: First token in what is read that is attended to.
        past_end: One past the last.
        mask: What to add to scores ``[tokens, past + tokens]``; None where causal order is all.
    """

    begin: int
    end: int
    past: _Gather | None
    past_begin: int
    past_end: int
    mask: Tensor | None


class Pages:
    """Two flat views of a rank's cache, in which one layer's part is an offset.

    Rows of ``blocks`` are what one head has of one block (``[S * D]``), rows of ``slots`` are what
    it has of one token (``[D]``). An index made for layer 0 holds for every layer.

    Args:
        cache: ``[N, L, 2, K, S, D]``.
    """

    def __init__(self, cache: Tensor) -> None:
        self.cache = cache
        _, self.layers, _, self.kv_heads, self.block_size, self.head_dim = cache.shape
        self._blocks = cache.view(-1, self.block_size * self.head_dim)
        self._slots = cache.view(-1, self.head_dim)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """``blocks`` and ``slots`` from this layer's first row on."""
        first = index * 2 * self.kv_heads
        return self._blocks[first:], self._slots[first * self.block_size :]

    def block_rows(self, block_ids: Tensor) -> Tensor:
        """Rows of layer 0's ``blocks``: ``[...]`` block ids to ``[2, K, ...]``."""
        heads = torch.arange(2 * self.kv_heads).view(2, self.kv_heads, *[1] * block_ids.dim())
        return heads + block_ids * (self.layers * 2 * self.kv_heads)

    def slot_rows(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Rows of layer 0's ``slots`` for tokens ``[T]`` in blocks: ``[T, 2, K]``, flat."""
        rows = self.block_rows(block_ids) * self.block_size + offsets
        return rows.permute(2, 0, 1).reshape(-1)


class AttentionPlan:
    """What one step's attention does in every layer.

    Args:
        rows: The step's rows.
        block_of: Block of each token, ``[T]``.
        offset_of: Its place in that block, ``[T]``.
        pages: The cache.
        num_heads: Query heads (H).
        window: Sliding window in tokens, or None.
        capped: Whether scores are soft-capped, which no fused kernel does.
        dtype: Data type of scores.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        block_of: Tensor,
        offset_of: Tensor,
        pages: Pages,
        num_heads: int,
        window: int | None,
        capped: bool,
        dtype: torch.dtype,
    ) -> None:
        self._pages = pages
        self._share = num_heads // pages.kv_heads
        self._window = window
        self._capped = capped
        self._dtype = dtype
        self._block_of = block_of
        self._offset_of = offset_of
        self._write_to: Tensor | None = None
        self.chunks = [self._chunk(row) for row in rows if row.count > 1]
        singles = [row for row in rows if row.count == 1]
        self.singles: _Singles | None = None
        self.groups: list[_DecodeGroup] = []
        if native.attends(dtype, pages.head_dim) and not capped:
            self.singles = self._singles(singles) if singles else None
        else:
            self.groups = [
                self._group(group, whole=len(group) == len(rows)) for group in self._alike(singles)
            ]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The cache's `Pages.layer`."""
        return self._pages.layer(index)

    def write(self, heads: Tensor, rotation: Rotation | None, index: int) -> None:
        """Rotates queries and keys in place and writes keys and values into a layer's cache.

        Args:
            heads: All tokens' Q, K and V: ``[T, H + 2K, D]``.
            rotation: Their positions; None for a model that does not rotate.
            index: The layer.
        """
        pages = self._pages
        whole = rotation is not None and rotation.width == pages.head_dim
        if rotation is not None and whole and native.computes(self._dtype):
            native.ops.rotate_and_store(
                heads,
                rotation.cos,
                rotation.sin,
                pages.cache,
                index,
                self._block_of,
                self._offset_of,
            )
            return
        if rotation is not None:
            rotation.apply_(heads[:, : -pages.kv_heads])
        if self._write_to is None:
            self._write_to = pages.slot_rows(self._block_of, self._offset_of)
        kv = heads[:, -2 * pages.kv_heads :]
        _, slots = pages.layer(index)
        slots.index_copy_(0, self._write_to, kv.reshape(-1, pages.head_dim))

    def attend_singles(self, query: Tensor, index: int, scale: float, out: Tensor) -> None:
        """Native attention of all rows of one token: ``[T, H, D]`` into their rows of ``out``."""
        assert self.singles is not None
        rows = self.singles
        native.ops.paged_attention(
            out,
            query,
            self._pages.cache,
            index,
            rows.tokens,
            rows.table,
            rows.begins,
            rows.ends,
            scale,
        )

    def _singles(self, rows: list[Row]) -> _Singles:
        window = self._window
        return _Singles(
            tokens=torch.tensor([row.begin for row in rows]),
            table=_table(
                [row.block_ids[: -(-row.length // self._pages.block_size)] for row in rows]
            ),
            begins=torch.tensor(
                [0 if window is None else max(0, row.length - window) for row in rows]
            ),
            ends=torch.tensor([row.length for row in rows]),
        )

    def _first_block(self, row: Row) -> int:
        """The first of a row's blocks that any of its tokens still sees."""
        if self._window is None:
            return 0
        return max(0, row.start - self._window + 1) // self._pages.block_size

    def _alike(self, rows: list[Row]) -> list[list[Row]]:
        """Groups of rows whose blocks to read do not differ too much in number."""
        size = self._pages.block_size
        reads = {id(row): -(-row.length // size) - self._first_block(row) for row in rows}
        groups: list[list[Row]] = []
        longest = 0
        for row in sorted(rows, key=lambda row: -reads[id(row)]):
            if not groups or reads[id(row)] < longest * _GROUP_FILL:
                groups.append([])
                longest = reads[id(row)]
            groups[-1].append(row)
        for group in groups:
            group.sort(key=lambda row: row.begin)
        return groups

    def _gather(self, rows: Sequence[Row], blocks: Sequence[NDArray[np.int64]]) -> _Gather:
        table = _table(blocks)
        pages = self._pages
        index = pages.block_rows(table).transpose(1, 2)
        shape = (2, len(rows), pages.kv_heads, table.shape[1] * pages.block_size, pages.head_dim)
        return _Gather(index.reshape(-1), shape)

    def _group(self, rows: Sequence[Row], *, whole: bool) -> _DecodeGroup:
        size = self._pages.block_size
        firsts = [self._first_block(row) for row in rows]
        blocks = [
            row.block_ids[first : -(-row.length // size)]
            for row, first in zip(rows, firsts, strict=True)
        ]
        gather = self._gather(rows, blocks)
        ends = [row.length - first * size for row, first in zip(rows, firsts, strict=True)]
        place = torch.arange(gather.shape[3])
        end = torch.tensor(ends).unsqueeze(1)
        hidden = place >= end
        if self._window is not None:
            hidden |= place < end - self._window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, _MASKED)
        heads = (len(rows), self._pages.kv_heads, self._share, mask.shape[1])
        return _DecodeGroup(
            tokens=None if whole else torch.tensor([row.begin for row in rows]),
            gather=gather,
            mask=mask[:, None, None].expand(heads).flatten(0, 1),
        )

    def _chunk(self, row: Row) -> _Chunk:
        size = self._pages.block_size
        begin = 0 if self._window is None else max(0, row.start - self._window + 1)
        first, last = begin // size, -(-row.start // size)
        past = self._gather([row], [row.block_ids[first:last]]) if row.start else None
        mask = None
        cut = self._window is not None and row.length > self._window
        if cut or self._capped:
            query = torch.arange(row.start, row.length).unsqueeze(1)
            key = torch.arange(begin, row.length)
            hidden = key > query
            if self._window is not None:
                hidden |= key <= query - self._window
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, _MASKED)
        return _Chunk(
            begin=row.begin,
            end=row.begin + row.count,
            past=past,
            past_begin=begin - first * size,
            past_end=row.start - first * size,
            mask=mask,
        )


def _table(blocks: Sequence[NDArray[np.int64]]) -> Tensor:
    """Rows' blocks, ``[rows, longest]``; the shorter end with their last block again.

    It is read as padding by plain torch: memory that the row has touched anyway.
    """
    table = np.empty((len(blocks), max(map(len, blocks))), dtype=np.int64)
    for row, ids in zip(table, blocks, strict=True):
        row[: len(ids)] = ids
        row[len(ids) :] = ids[-1]
    return torch.from_numpy(table)


class Step:
    """What a step's layers share, made when the first of them asks.

    Layers differ in what they see and how they rotate, but only in a few ways.

    Args:
        rows: The step's rows.
        positions: Position of each token, ``[T]``.
        block_of: Block that takes its KV, ``[T]``.
        offset_of: Its place in that block, ``[T]``.
        cache: The rank's KV, ``[N, L, 2, K, S, D]``.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        positions: Tensor,
        block_of: Tensor,
        offset_of: Tensor,
        cache: Tensor,
    ) -> None:
        self._rows = rows
        self._positions = positions
        self._block_of = block_of
        self._offset_of = offset_of
        self._pages = Pages(cache)
        self._plans: dict[tuple[int, int | None, bool], AttentionPlan] = {}
        self._rotations: dict[Rope, Rotation] = {}

    def plan(self, num_heads: int, window: int | None, capped: bool) -> AttentionPlan:
        """What attention of this kind reads and writes; see `AttentionPlan`."""
        kind = (num_heads, window, capped)
        if kind not in self._plans:
            self._plans[kind] = AttentionPlan(
                self._rows,
                self._block_of,
                self._offset_of,
                self._pages,
                *kind,
                self._pages.cache.dtype,
            )
        return self._plans[kind]

    def rotation(self, rope: Rope | None) -> Rotation | None:
        """How far the step's tokens are rotated."""
        if rope is None:
            return None
        if rope not in self._rotations:
            self._rotations[rope] = rope.at(self._positions)
        return self._rotations[rope]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each query and each key, before they are rotated.

    Attributes:
        query: ``[D]``.
        key: ``[D]``.
    """

    query: RMSNorm
    key: RMSNorm

    def apply_(self, heads: Tensor, num_heads: int, num_kv_heads: int) -> None:
        """In place, in ``[T, H + 2K, D]``."""
        parts = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        for part, norm in zip(parts, (self.query, self.key), strict=True):
            # A rank's only KV head is a column of `heads`, which no reshape needs to copy.
            part.copy_(norm(part.reshape(-1, part.shape[-1]).contiguous()).view(part.shape))


class Attention:
    """Multi-head attention with shared KV heads (GQA, Ainslie et al., 2023).

    Args:
        qkv: All three projections as one: H query heads, then K key heads, then K value heads.
        out: The projection back.
        num_heads: H, of this rank.
        num_kv_heads: K, of this rank.
        head_dim: D.
        rope: How queries and keys are rotated, if they are.
        window: Tokens that a token sees, itself included; None for all.
        norms: Of queries and keys.
        scale: What scores are multiplied by; 1 / sqrt(D) unless told otherwise.
        softcap: Scores stay between this and its negative; None lets them.
    """

    def __init__(
        self,
        qkv: Projection,
        out: Projection,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rope: Rope | None,
        window: int | None = None,
        norms: HeadNorms | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self._qkv = qkv
        self._out = out
        self._heads = num_heads
        self._kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._rope = rope
        self._window = window
        self._norms = norms
        self._scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self._softcap = softcap

    def __call__(self, x: Tensor, step: Step, index: int, residual: Tensor | None = None) -> Tensor:
        """Writes the tokens' KV into the cache, then attends.

        Args:
            x: ``[T, E]``.
            step: What to write and read.
            index: Which of the cache's layers this is.
            residual: What the result is added to: ``[T, E]``.

        Returns:
            ``[T, E]``.
        """
        plan = step.plan(self._heads, self._window, self._softcap is not None)
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        if self._norms is not None:
            self._norms.apply_(heads, self._heads, self._kv_heads)
        plan.write(heads, step.rotation(self._rope), index)
        query = heads[:, : self._heads]
        blocks, _ = plan.layer(index)
        if len(plan.groups) == 1 and plan.groups[0].tokens is None:
            return self._out(self._decode(query, plan.groups[0], blocks), residual)
        mixed = query.new_empty(x.shape[0], self._heads * self._head_dim)
        if plan.singles is not None:
            plan.attend_singles(query, index, self._scale, mixed)
        for group in plan.groups:
            mixed[group.tokens] = self._decode(query[group.tokens], group, blocks)
        for chunk in plan.chunks:
            part = heads[chunk.begin : chunk.end]
            mixed[chunk.begin : chunk.end] = self._prefill(part, chunk, blocks)
        return self._out(mixed, residual)

    def _decode(self, query: Tensor, group: _DecodeGroup, blocks: Tensor) -> Tensor:
        """``[B, H, D]`` to ``[B, H * D]``."""
        keys, values = group.gather.read(blocks)
        folded = query.reshape(-1, self._heads // self._kv_heads, self._head_dim)
        keys = keys.flatten(0, 1).transpose(1, 2)
        if self._softcap is None:
            scores = torch.baddbmm(group.mask, folded, keys, alpha=self._scale)
        else:
            scores = softcapped(torch.bmm(folded, keys) * self._scale, self._softcap) + group.mask
        mixed = torch.bmm(torch.softmax(scores, -1), values.flatten(0, 1))
        return mixed.view(query.shape[0], -1)

    def _prefill(self, heads: Tensor, chunk: _Chunk, blocks: Tensor) -> Tensor:
        """Q, K and V ``[T, H + 2K, D]`` of one row to ``[T, H * D]``."""
        query, keys, values = torch.split(
            heads, [self._heads, self._kv_heads, self._kv_heads], dim=1
        )
        # KV heads become the batch and the query heads that share one become its heads.
        share = self._heads // self._kv_heads
        query = query.view(-1, self._kv_heads, share, self._head_dim).permute(1, 2, 0, 3)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        past: tuple[Tensor, Tensor] | None = None
        if chunk.past is not None:
            old_keys, old_values = (
                part[0, :, chunk.past_begin : chunk.past_end] for part in chunk.past.read(blocks)
            )
            past = (old_keys, old_values)
        if chunk.mask is None:
            mixed = self._causal(query, keys, values, past)
        else:
            if past is not None:
                keys, values = torch.cat((past[0], keys), 1), torch.cat((past[1], values), 1)
            mixed = self._masked(query, keys, values, chunk.mask)
        return mixed.permute(2, 0, 1, 3).reshape(heads.shape[0], -1)

    def _causal(
        self, query: Tensor, keys: Tensor, values: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """``[K, H / K, T, D]`` to the same: to the chunk causally, and to all of the past."""
        share = query.shape[1]
        mixed, weight = _flash(
            query, _shared(keys, share), _shared(values, share), self._scale, causal=True
        )
        if past is None:
            return mixed
        old_keys, old_values = past
        old, old_weight = _flash(
            query, _shared(old_keys, share), _shared(old_values, share), self._scale, causal=False
        )
        # Softmax over both is each one's softmax, weighted by its sum of exponentials.
        old_share = torch.sigmoid(old_weight - weight).unsqueeze(-1).to(mixed.dtype)
        return torch.lerp(mixed, old, old_share)

    def _masked(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """The same, to whatever the mask leaves."""
        share = query.shape[1]
        keys, values = _shared(keys, share), _shared(values, share)
        if self._softcap is None:
            return functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=self._scale
            )
        scores = softcapped(query @ keys.transpose(-1, -2) * self._scale, self._softcap) + mask
        return torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype) @ values


def _shared(heads: Tensor, share: int) -> Tensor:
    """``[K, T, D]`` as ``[K, H / K, T, D]`` without a copy."""
    return heads.unsqueeze(1).expand(-1, share, -1, -1)


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention and the logarithm of its sum of exponentials, ``[K, H / K, T]``."""
    mixed, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, scale=scale
    )
    return mixed, weight
