"""A tiny Llama without weights, for daemons started with ``--use-dummy-weights``."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [ENDOFTEXT, IM_START, IM_END]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = """
The ferry leaves the harbour at seven, and whoever is late waits for the next one.
A lighthouse keeper counts the ships that pass: four in the morning, nine in the afternoon.
When the wind turns, the fishermen mend their nets and talk about the weather of other years.
She wrote the whole letter twice, because the first one had been honest and the second was kind.
def area(width, height):
    return width * height
for number in range(10): print(number, number ** 2)
Die Brücke über den Fluss ist schmal, doch jeden Morgen gehen hundert Kinder hinüber.
Le boulanger ouvre sa boutique avant l'aube et la rue entière sent le pain chaud.
El río baja crecido después de la lluvia; nadie cruza hasta mañana.
Поезд опоздал на час, и все пассажиры пили чай в маленьком буфете.
灯塔看守人数着经过的船只，早上四艘，下午九艘。
橋の上から川を見ると、小さな魚がたくさん泳いでいます。
바람이 바뀌면 어부들은 그물을 고치고 날씨 이야기를 합니다.
القطار تأخر ساعة كاملة وشرب الركاب الشاي في المقهى الصغير.
नदी के किनारे बच्चे हर सुबह पतंग उड़ाते हैं।
🙂 🚀 👩‍👩‍👧 🇫🇷 café naïve
"""


def write_tiny_model(
    path: Path,
    *,
    vocab_size: int = 512,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 4096,
    tie: bool = False,
) -> Path:
    """Writes config, tokenizer and ChatML template of a tiny Llama; the same bytes every time."""
    path.mkdir(parents=True, exist_ok=True)
    eos = SPECIAL_TOKENS.index(IM_END)
    bos = SPECIAL_TOKENS.index(IM_START)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": tie,
        "torch_dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }
    _write(path / "config.json", config)
    _write(path / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "unk_token": ENDOFTEXT,
        "pad_token": IM_END,
        "model_max_length": max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(path / "tokenizer_config.json", tokenizer_config)
    train_tokenizer(vocab_size).save(str(path / "tokenizer.json"))
    return path


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly that many tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        # More tokens than the corpus has merges for; the rest are words of their own.
        tokenizer.add_tokens([f"word{n}" for n in range(vocab_size - size)])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size: {vocab_size} is below {len(SPECIAL_TOKENS) + 256}")
    return tokenizer


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
