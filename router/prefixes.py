"""Which prompts a node has most likely still the KV of: what this router has given it lately."""

from collections import OrderedDict
from collections.abc import Sequence

from splitserve.core.node import NodeInfo
from splitserve.kv.keys import PrefixKey, extend_keys


class PromptKeys:
    """A prompt's keys, for whatever block size a node has; made once for each.

    Args:
        token_ids: The prompt.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._by_block_size: dict[int, list[PrefixKey]] = {}

    def of(self, block_size: int) -> list[PrefixKey]:
        """One per full block."""
        if (keys := self._by_block_size.get(block_size)) is None:
            keys = self._by_block_size[block_size] = []
            extend_keys(keys, self.token_ids, block_size, len(self.token_ids) // block_size)
        return keys


class GivenPrefixes:
    """The prompts a node was given, no more of them than fit its blocks.

    The node decides what it keeps; this is a guess, and costs time only where it is wrong.

    Args:
        info: The node.
    """

    def __init__(self, info: NodeInfo) -> None:
        self._block_size = info.block_size
        self._most = info.num_blocks if info.prefix_cache else 0
        # The one given longest ago comes first.
        self._given: OrderedDict[PrefixKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._given)

    def match(self, prompt: PromptKeys) -> int:
        """How many of a prompt's first tokens the node has the KV of."""
        if not self._given:
            return 0
        blocks = 0
        for key in prompt.of(self._block_size):
            if key not in self._given:
                break
            blocks += 1
        return blocks * self._block_size

    def add(self, prompt: PromptKeys) -> None:
        """The node is given a prompt."""
        if not self._most:
            return
        # Backwards: a prompt is forgotten from its end.
        for key in reversed(prompt.of(self._block_size)[: self._most]):
            self._given[key] = None
            self._given.move_to_end(key)
        while len(self._given) > self._most:
            self._given.popitem(last=False)
