"""Qwen2 (Yang et al., 2024): Llama with biases on queries, keys and values."""

from functools import partial

from splitserve.model import llama

FAMILY = llama.family(attention=partial(llama.attention, qkv_bias=True))
