import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.text.detokenizer import REPLACEMENT, Detokenizer
from splitserve.text.tokenizer import Tokenizer

# Every way text goes wrong at token boundaries, and plain words around it.
FRAGMENTS = [
    " ",
    "  ",
    "\n",
    "\t",
    "the ferry",
    " leaves",
    "👩‍👩‍👧‍👦",
    "👍🏽",
    "🇫🇷",
    "灯塔看守人",
    "橋の上",
    "القطار تأخر",
    "नदी के",
    "e\u0301\u0323",
    "ထမင်း",
    "𝕬",
    "\u200d",
    "▁",
    "<0x41>",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def split(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(list(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return pieces


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], sizes: Sequence[int]
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    deltas = [detokenizer.push(piece) for piece in split(ids, sizes)]
    return [*deltas, detokenizer.flush()]


def added(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What the answer adds to a prompt that ends in whole characters."""
    before, after = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    assert after.startswith(before)
    return after[len(before) :]


@given(prompt=TEXTS, answer=TEXTS, sizes=SIZES)
def test_fault_32_deltas_concatenate_to_the_exact_text(
    tokenizer: Tokenizer, prompt: str, answer: str, sizes: list[int]
) -> None:
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    deltas = stream(tokenizer, prompt_ids, ids, sizes)
    assert "".join(deltas) == added(tokenizer, prompt_ids, ids)
    if REPLACEMENT not in answer:
        assert not any(REPLACEMENT in delta for delta in deltas)


@given(answer=TEXTS, sizes=SIZES)
def test_fault_32_the_answer_is_the_text_that_was_encoded(
    byte_tokenizer: Tokenizer, answer: str, sizes: list[int]
) -> None:
    ids = byte_tokenizer.encode(answer, add_special_tokens=False)
    assert "".join(stream(byte_tokenizer, [], ids, sizes)) == answer


@settings(max_examples=300)
@given(data=st.data(), sizes=SIZES)
def test_fault_32_any_tokens_give_the_text_of_decoding_them_at_once(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    token_ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30)
    # Mostly bytes: whole characters, broken ones, and everything between.
    ids = data.draw(token_ids | st.lists(st.integers(3, 258), max_size=30))
    word = tokenizer.encode("the", add_special_tokens=False)
    for prompt in ([], word, [2], [*word, 2]):
        assert "".join(stream(tokenizer, prompt, ids, sizes)) == added(tokenizer, prompt, ids)


@settings(max_examples=300)
@given(data=st.data(), sizes=SIZES)
def test_fault_32_a_prompt_that_ends_inside_a_character_is_continued(
    byte_tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    token_ids = st.lists(st.integers(0, 258), max_size=8)
    prompt, ids = data.draw(token_ids), data.draw(token_ids)
    before, after = byte_tokenizer.decode(prompt), byte_tokenizer.decode(prompt + ids)
    # The last U+FFFD of the prompt's text may become the answer's first character.
    start = len(before) if after.startswith(before) else len(before) - 1
    assert "".join(stream(byte_tokenizer, prompt, ids, sizes)) == after[start:]


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        ("0A", "0A", "\n"),
        ("0A E4", "B8 96", "世"),
        ("E4 B8", "96 E4 B8 96", "世世"),
        ("0A", "E4", REPLACEMENT),
        ("E4", "0A", REPLACEMENT),
        ("E4", "", ""),
    ],
)
@pytest.mark.parametrize("end", [[], ["ferry"]])
def test_fault_32_a_run_of_bytes_begun_by_the_prompt_is_shared(
    llama_tokenizer: Tokenizer, prompt: str, answer: str, text: str, end: list[str]
) -> None:
    byte_ids = {byte: i for i, byte in llama_tokenizer.fallback_bytes.items()}
    word = llama_tokenizer.encode("the", add_special_tokens=False)
    prompt_ids = word + [byte_ids[byte] for byte in bytes.fromhex(prompt)]
    ids = [byte_ids[byte] for byte in bytes.fromhex(answer)]
    ids += [i for w in end for i in llama_tokenizer.encode(w, add_special_tokens=False)]
    expected = text + "".join(" " + w for w in end)
    assert "".join(stream(llama_tokenizer, prompt_ids, ids, [1])) == expected


def test_fault_32_half_a_surrogate_at_the_end_of_a_prompt_is_not_the_answers(
    byte_tokenizer: Tokenizer,
) -> None:
    # An example of the property above that Hypothesis finds rarely.
    prompt = [i for i in range(259) if byte_tokenizer.token_bytes(i) == b"\xed"]
    prompt += [i for i in range(259) if byte_tokenizer.token_bytes(i) == b"\xa0"]
    word = byte_tokenizer.encode("the", add_special_tokens=False)
    assert len(prompt) == 2
    assert "".join(stream(byte_tokenizer, prompt, [], [1])) == ""
    assert "".join(stream(byte_tokenizer, prompt, word, [1])) == "the"


def test_fault_32_a_character_appears_with_its_last_byte(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("🦀", add_special_tokens=False)
    assert len(ids) == 3  # The bytes of every emoji's first half are one token.
    detokenizer = Detokenizer(byte_tokenizer, [])
    assert [detokenizer.push([i]) for i in ids] == ["", "", "🦀"]
    assert detokenizer.flush() == ""


def test_fault_32_invalid_bytes_are_replaced_once_they_cannot_complete(
    byte_tokenizer: Tokenizer,
) -> None:
    crab = byte_tokenizer.encode("🦀", add_special_tokens=False)
    detokenizer = Detokenizer(byte_tokenizer, [])
    assert detokenizer.push(crab[:2]) == ""
    assert detokenizer.push(crab) == REPLACEMENT + "🦀"


@pytest.mark.parametrize("interval", range(1, 9))
def test_fault_33_spaces_are_kept_at_every_streaming_interval(
    tokenizer: Tokenizer, interval: int
) -> None:
    prompt = tokenizer.encode("The ferry", add_special_tokens=False)
    ids = tokenizer.encode(" leaves  at   seven , and\n waits ", add_special_tokens=False)
    assert "".join(stream(tokenizer, prompt, ids, [interval])) == added(tokenizer, prompt, ids)
    assert "".join(stream(tokenizer, [], ids, [interval])) == tokenizer.decode(ids)


def test_fault_33_the_first_word_keeps_its_space_after_a_prompt_only(
    llama_tokenizer: Tokenizer,
) -> None:
    prompt = llama_tokenizer.encode("The ferry", add_special_tokens=False)
    ids = llama_tokenizer.encode("leaves", add_special_tokens=False)
    assert "".join(stream(llama_tokenizer, prompt, ids, [1])) == " leaves"
    assert "".join(stream(llama_tokenizer, [], ids, [1])) == "leaves"
    assert "".join(stream(llama_tokenizer, [1], ids, [1])) == "leaves"  # Only BOS before it.


@given(answer=TEXTS, cut=st.integers(0, 40))
def test_state_follows_from_the_tokens_alone(tokenizer: Tokenizer, answer: str, cut: int) -> None:
    ids = tokenizer.encode(answer, add_special_tokens=False)
    one_by_one, at_once = Detokenizer(tokenizer, []), Detokenizer(tokenizer, [])
    so_far = "".join(one_by_one.push([i]) for i in ids[:cut])
    assert at_once.push(ids[:cut]) == so_far
    assert [one_by_one.push([i]) for i in ids[cut:]] == [at_once.push([i]) for i in ids[cut:]]


def test_cost_of_a_token_does_not_grow_with_a_run_of_invalid_bytes(tokenizer: Tokenizer) -> None:
    crab = tokenizer.encode("🦀", add_special_tokens=False)
    run = crab[-1:] * 4_000  # Continuation bytes that continue nothing.

    def seconds(count: int) -> float:
        detokenizer = Detokenizer(tokenizer, [])
        start = time.perf_counter()
        for token_id in run[:count]:
            detokenizer.push([token_id])
        detokenizer.flush()
        return time.perf_counter() - start

    short = min(seconds(400) for _ in range(5))
    long = min(seconds(4_000) for _ in range(5))
    assert long < 40 * short  # Ten times as much if linear, a hundred times if not.
