"""Finding a request's first tokens in blocks that an earlier one has left."""

from splitserve.core.request import Request
from splitserve.kv.blocks import BlockManager
from splitserve.kv.keys import extend_keys


class PrefixCache:
    """What a node still holds of prompts and answers that it has had; one model's only.

    Args:
        blocks: The node's blocks.
        enabled: Whether anything is kept at all.

    Attributes:
        hit_tokens_total: Tokens found since start.
    """

    def __init__(self, blocks: BlockManager, enabled: bool = True) -> None:
        self._blocks = blocks
        self._enabled = enabled
        self.hit_tokens_total = 0

    def find(self, request: Request, most: int) -> list[int]:
        """Blocks that hold the request's first tokens, of at most so many tokens."""
        if not self._enabled:
            return []
        count = most // self._blocks.block_size
        self._extend(request, count)
        return self._blocks.find(request.prefix_keys[:count])

    def begin(self, found: list[int], first: Request, *others: Request) -> None:
        """Requests of one prompt, for the first of which blocks were found, begin with these."""
        num_tokens = len(found) * self._blocks.block_size
        self.hit_tokens_total += num_tokens
        for request in (first, *others):
            request.cached = request.computed = num_tokens
            request.remembered = len(found)
            request.prefix_keys = first.prefix_keys.copy()

    def remember(self, request: Request) -> None:
        """The request's KV has grown: its full blocks can be found from now on."""
        if not self._enabled:
            return
        count = request.computed // self._blocks.block_size
        for index in range(request.remembered, count):
            self._extend(request, index + 1)
            self._blocks.remember(request.prefix_keys[index], request.block_ids[index])
        request.remembered = max(request.remembered, count)

    def _extend(self, request: Request, count: int) -> None:
        extend_keys(request.prefix_keys, request.token_ids, self._blocks.block_size, count)
