"""What a router guesses of a node's prefix cache."""

import random

from router.prefixes import GivenPrefixes, PromptKeys
from splitserve.core.node import NodeInfo, NodeKind


def node(block_size: int = 4, num_blocks: int = 6, prefix_cache: bool = True) -> GivenPrefixes:
    return GivenPrefixes(
        NodeInfo(
            NodeKind.PREFILL, "a:1", "e", "m", "f", 512, "float32", block_size, num_blocks, 4096,
            ("shm",), "1", prefix_cache=prefix_cache,
        )
    )  # fmt: skip


def test_a_prompt_matches_as_far_as_full_blocks_were_given():
    prefixes = node()
    prefixes.add(PromptKeys(range(11)))
    assert prefixes.match(PromptKeys(range(11))) == 8
    assert prefixes.match(PromptKeys([*range(6), 99, 7])) == 4
    assert prefixes.match(PromptKeys([1, *range(11)])) == 0
    assert prefixes.match(PromptKeys(range(3))) == 0


def test_nodes_of_other_block_sizes_have_their_own_keys():
    prompt = PromptKeys(range(24))
    small, large = node(4), node(8)
    small.add(prompt)
    large.add(prompt)
    assert small.match(prompt) == large.match(prompt) == 24


def test_what_was_given_long_ago_is_forgotten_from_its_end_and_the_rest_is_bounded():
    prefixes = node(num_blocks=6)
    old, new = PromptKeys(range(100, 116)), PromptKeys(range(200, 216))
    prefixes.add(old)
    prefixes.add(new)
    assert len(prefixes) == 6
    assert prefixes.match(new) == 16
    assert prefixes.match(old) == 8
    prefixes.add(PromptKeys(range(300, 400)))
    assert len(prefixes) == 6


def test_a_node_without_a_cache_is_given_nothing_to_keep():
    prefixes = node(prefix_cache=False)
    prefixes.add(PromptKeys(range(16)))
    assert prefixes.match(PromptKeys(range(16))) == len(prefixes) == 0


def test_keys_depend_on_all_tokens_before():
    source = random.Random(0)
    tokens = [source.randrange(2**31) for _ in range(64)]
    keys = PromptKeys(tokens).of(8)
    for changed in range(64):
        other = PromptKeys([*tokens[:changed], tokens[changed] ^ 1, *tokens[changed + 1 :]]).of(8)
        same = [a == b for a, b in zip(keys, other, strict=True)]
        assert same == [True] * (changed // 8) + [False] * (8 - changed // 8)
