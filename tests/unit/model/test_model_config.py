"""A model's config says what the model is, on every host the same, and without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitserve.core.errors import InvalidArgumentError, NotFoundError
from splitserve.model.config import (
    ModelConfig,
    RopeConfig,
    resolve_dtype,
)
from splitserve.model.fingerprint import architecture_fingerprint, fingerprint

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def write(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    raw = {key: value for key, value in {**RAW, **changes}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, splitserve.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(write(tmp_path / "some-model"))
    assert (config.name, config.dtype) == ("some-model", "bfloat16")
    assert (config.num_kv_heads, config.head_dim) == (4, 4)
    assert config.rope(0) == RopeConfig()
    assert not config.tie_word_embeddings
    assert config.sliding_window is None


def test_eos_tokens_of_both_files_end_an_answer(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[2, 3])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == {2, 3, 7}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
)
def test_old_and_new_forms_of_rope_say_the_same(tmp_path: Path, changes: Any) -> None:
    rope = ModelConfig.from_dir(write(tmp_path, **changes)).rope(0)
    assert rope == RopeConfig(theta=5e5, kind="linear", factor=4.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Weird"]}, "LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": ...}, "LlamaForCausalLM"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"vocab_size": "many"}, "many"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_scaling": {"type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
    ],
)
def test_a_bad_config_is_refused_in_one_line_that_names_the_file(
    tmp_path: Path, changes: Any, words: str
) -> None:
    write(tmp_path, **changes)
    with pytest.raises(InvalidArgumentError) as raised:
        ModelConfig.from_dir(tmp_path)
    assert words in raised.value.message
    assert str(tmp_path / "config.json") in raised.value.message
    assert "\n" not in raised.value.message


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        ModelConfig.from_dir(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match=r"config\.json is not JSON"):
        ModelConfig.from_dir(tmp_path)


def test_a_named_dtype_is_taken_and_auto_is_one_we_compute_in(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(write(tmp_path))
    assert resolve_dtype("float16", config) == "float16"
    assert resolve_dtype("auto", config) in ("float32", "bfloat16")


def weights(path: Path, value: int, size: int = 300_000) -> None:
    header = b"{}"
    data = len(header).to_bytes(8, "little") + header + bytes([value]) * size
    (path / "model.safetensors").write_bytes(data)


def test_fingerprints_tell_models_apart_and_not_directories(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    for path in (one, two):
        weights(path, 1)
        (path / "tokenizer.json").write_text("{}")
    seen = fingerprint(one, dummy_seed=None)
    assert seen == fingerprint(two, dummy_seed=None)
    assert seen.split("-")[0] == architecture_fingerprint(one)
    weights(two, 2)
    assert fingerprint(two, dummy_seed=None) != seen
    assert architecture_fingerprint(two) == architecture_fingerprint(one)
    (two / "tokenizer.json").write_text("{} ")
    assert architecture_fingerprint(two) != architecture_fingerprint(one)
    assert architecture_fingerprint(write(tmp_path / "three", rope_theta=7.0)) != seen


def test_dummy_weights_are_known_by_their_seed(tmp_path: Path) -> None:
    write(tmp_path)
    assert fingerprint(tmp_path, dummy_seed=1) == fingerprint(tmp_path, dummy_seed=1)
    assert fingerprint(tmp_path, dummy_seed=1) != fingerprint(tmp_path, dummy_seed=2)
    with pytest.raises(NotFoundError, match="safetensors"):
        fingerprint(tmp_path, dummy_seed=None)


def test_a_fingerprint_says_how_weights_are_rounded(tmp_path: Path) -> None:
    write(tmp_path)
    exact = fingerprint(tmp_path, dummy_seed=1)
    assert fingerprint(tmp_path, dummy_seed=1, quantization="int8") == f"{exact}-int8"
