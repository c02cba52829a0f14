"""How many KV blocks a worker has, and how long a request may get."""

from splitserve.core.config import EngineConfig
from splitserve.core.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.kv.layout import KVLayout

DEFAULT_CACHE_TOKENS = 32_768
"""Tokens of KV unless told otherwise, or one request of the longest kind if that is more."""

DEFAULT_MEMORY_SHARE = 0.25
"""Most of the free memory that KV takes unless told otherwise; two nodes share a machine."""


def choose_num_blocks(
    config: EngineConfig, layout: KVLayout, model_len: int, free_bytes: int
) -> int:
    """How many blocks to make.

    Args:
        config: May say so.
        layout: What a block holds.
        model_len: Most tokens the model was made for.
        free_bytes: Memory that can be had.

    Raises:
        ResourceExhaustedError: The default share of the memory does not hold one block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    wanted = layout.blocks_for(max(DEFAULT_CACHE_TOKENS, config.max_model_len or model_len))
    affordable = int(free_bytes * DEFAULT_MEMORY_SHARE) // layout.block_bytes
    if affordable < 1:
        raise ResourceExhaustedError(
            f"KV cache: a block is {layout.block_bytes:,} bytes, more than "
            f"{DEFAULT_MEMORY_SHARE:.0%} of the {free_bytes:,} free; set num_blocks to take more"
        )
    return min(wanted, affordable)


def choose_max_model_len(
    config: EngineConfig, layout: KVLayout, model_len: int, num_blocks: int
) -> int:
    """Most tokens of prompt and answer together.

    Raises:
        InvalidArgumentError: The one asked for fits neither the model nor the blocks.
    """
    held = num_blocks * layout.block_size
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
            f"{layout.block_size} hold {held} tokens: set more num_blocks, or a smaller length"
        )
    return config.max_model_len
