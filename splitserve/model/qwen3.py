"""Qwen3 (Yang et al., 2025): Llama with a norm on each query and key."""

from splitserve.model import llama
from splitserve.model.attention import Attention
from splitserve.model.builder import Builder


def attention(build: Builder, index: int) -> Attention:
    """A layer's attention."""
    return llama.attention(build, index, norms=llama.head_norms(build, index))


FAMILY = llama.family(attention=attention)
