"""What a node is going to be: settled before any process starts or weight is read. No torch."""

from dataclasses import dataclass

from splitserve.core.config import EngineConfig
from splitserve.core.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.kv.layout import KVLayout
from splitserve.model.config import ModelConfig, resolve_dtype
from splitserve.model.part import ModelPart

DEFAULT_CACHE_TOKENS = 32_768
"""Tokens of KV unless told otherwise, or one request of the longest kind if that is more."""

DEFAULT_MEMORY_SHARE = 0.25
"""Most of the free memory that KV takes unless told otherwise; two nodes share a machine."""


@dataclass(frozen=True)
class NodeShape:
    """The model, how ranks share it, and the KV they hold.

    Attributes:
        model: What the model is.
        dtype: Data type of weights, activations and KV.
        parts: What each rank holds of the model.
        layouts: What each rank's KV cache holds.
        num_blocks: KV blocks, the same ids on every rank.
        max_model_len: Most tokens of prompt and answer together.
    """

    model: ModelConfig
    dtype: str
    parts: tuple[ModelPart, ...]
    layouts: tuple[KVLayout, ...]
    num_blocks: int
    max_model_len: int

    @classmethod
    def plan(cls, config: EngineConfig, free_bytes: int) -> "NodeShape":
        """Works the shape out.

        Args:
            config: What is asked for.
            free_bytes: Memory that KV can have, of all ranks together.

        Raises:
            InvalidArgumentError: The model cannot be shared out like this, or the length asked
                for fits neither the model nor the blocks.
            NotFoundError: There is no such model.
            ResourceExhaustedError: The default share of the memory does not hold one block.
        """
        model = ModelConfig.from_dir(config.model)
        dtype = resolve_dtype(config.dtype, model)
        parts = tuple(
            ModelPart.of(model, config.parallel, rank) for rank in range(config.parallel.num_ranks)
        )
        layouts = tuple(part.kv_layout(model, config.block_size, dtype) for part in parts)
        num_blocks = _num_blocks(config, layouts, model.max_position_embeddings, free_bytes)
        return cls(
            model=model,
            dtype=dtype,
            parts=parts,
            layouts=layouts,
            num_blocks=num_blocks,
            max_model_len=_max_model_len(config, model.max_position_embeddings, num_blocks),
        )


def _num_blocks(
    config: EngineConfig, layouts: tuple[KVLayout, ...], model_len: int, free_bytes: int
) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    wanted = layouts[0].blocks_for(max(DEFAULT_CACHE_TOKENS, config.max_model_len or model_len))
    block_bytes = sum(layout.block_bytes for layout in layouts)
    affordable = int(free_bytes * DEFAULT_MEMORY_SHARE) // block_bytes
    if affordable < 1:
        raise ResourceExhaustedError(
            f"KV cache: a block is {block_bytes:,} bytes, more than "
            f"{DEFAULT_MEMORY_SHARE:.0%} of the {free_bytes:,} free; set num_blocks to take more"
        )
    return min(wanted, affordable)


def _max_model_len(config: EngineConfig, model_len: int, num_blocks: int) -> int:
    held = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model_len, held)
    if config.max_model_len > model_len:
        raise InvalidArgumentError(
            f"max_model_len: {config.max_model_len} is not allowed; "
            f"the model was made for {model_len} tokens"
        )
    if config.max_model_len > held:
        raise InvalidArgumentError(
            f"max_model_len: {config.max_model_len} is not allowed; {num_blocks} blocks of "
            f"{config.block_size} hold {held} tokens: set more num_blocks, or a smaller length"
        )
    return config.max_model_len
