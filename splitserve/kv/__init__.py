"""KV blocks: their shape, who holds them, and the memory they lie in."""
