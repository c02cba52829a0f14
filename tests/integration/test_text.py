"""Text through the whole path: whole characters, exact cuts, one BOS."""

import pytest
from tiny_model import CORPUS

from splitserve.core.request import FinishReason
from splitserve.core.sampling import SamplingParams
from splitserve.text.tokenizer import Tokenizer

SAMPLING = SamplingParams(max_tokens=120, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer.from_dir(tiny_model)


@pytest.mark.parametrize("seed", range(4))
def test_faults_32_33_deltas_concatenate_to_the_text_of_the_tokens(client, tokenizer, seed):
    sampling = SamplingParams(max_tokens=150, seed=seed, ignore_eos=True)
    deltas = list(client.generate(CORPUS[:80], sampling=sampling))
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert len(tokens) == 150
    # A random model writes broken UTF-8; what is right is what a one-shot decode makes of it.
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(tokens)


def test_fault_34_a_stop_string_is_cut_exactly_and_text_before_it_is_kept(client):
    whole = client.generate(CORPUS[:80], sampling=SAMPLING).completion()
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 7]
    sampling = SamplingParams(max_tokens=120, seed=3, ignore_eos=True, stop=(stop,))
    answer = client.generate(CORPUS[:80], sampling=sampling).completion()
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.usage.completion_tokens == len(answer.token_ids) < 120


def test_a_stop_string_in_the_first_token_needs_no_decode_node(client):
    for seed in range(100):
        one = SamplingParams(max_tokens=1, seed=seed)
        first = client.generate(CORPUS[:80], sampling=one).completion()
        # Not half of a character, which the next token would change.
        if first.text.isascii() and first.text:
            break
    sampling = SamplingParams(max_tokens=50, seed=seed, stop=(first.text,))
    answer = client.generate(CORPUS[:80], sampling=sampling).completion()
    assert answer.text == ""
    assert answer.finish_reason is FinishReason.STOP


def test_fault_35_a_chat_is_rendered_by_the_model_s_template_with_one_bos(client, tokenizer):
    chat = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Which ferry?"},
    ]
    rendered = (
        "<|im_start|>system\nAnswer in one word.<|im_end|>\n"
        "<|im_start|>user\nWhich ferry?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    by_chat = client.generate(chat=chat, sampling=SAMPLING).completion()
    by_ids = client.generate(token_ids=ids, sampling=SAMPLING).completion()
    assert by_chat.usage.prompt_tokens == len(ids)
    assert by_chat.token_ids == by_ids.token_ids
