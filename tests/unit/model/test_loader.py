"""Weights arrive whole or not at all, and dummy weights are the same everywhere."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitserve.core.errors import InvalidArgumentError, NotFoundError
from splitserve.model.config import ModelConfig
from splitserve.model.decoder import Decoder, ModelInput
from splitserve.model.loader import load_decoder


def load(path: Path, seed: int | None = None) -> Decoder:
    config = ModelConfig.from_dir(path)
    return load_decoder(config, path, "float32", dummy_seed=seed, progress=None)


def logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    cache = torch.zeros(8, 3, 2, 2, 16, 16)
    return decoder.forward(ModelInput.from_rows([(ids, 0, range(8), True)], 16), cache)


@pytest.fixture
def copy(llama: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama.path, tmp_path / "copy"))


def test_sharded_checkpoint_is_the_same_model(llama: Any, write_checkpoint: Any) -> None:
    sharded = write_checkpoint(max_shard="100KB")
    assert len(list(sharded.path.glob("*.safetensors"))) > 2
    ids = [5, 6, 7]
    assert torch.equal(logits(load(sharded.path), ids), logits(load(llama.path), ids))


def test_a_missing_shard_is_named(write_checkpoint: Any) -> None:
    path = write_checkpoint(max_shard="100KB").path
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(NotFoundError, match=gone.name):
        load(path)


def test_no_weights_is_an_error(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"model\.safetensors"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 4, 500, -1])
def test_a_truncated_file_is_an_error(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors is truncated or corrupt"):
        load(copy)


def test_a_corrupt_index_is_an_error(write_checkpoint: Any) -> None:
    path = write_checkpoint(max_shard="100KB").path
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(InvalidArgumentError, match=r"index\.json"):
        load(path)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(copy)


def test_a_wrong_shape_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"model\.norm\.weight.*\[7\].*\[96\]"):
        load(copy)


def test_an_unknown_activation_is_refused(copy: Path) -> None:
    config = replace(ModelConfig.from_dir(copy), hidden_act="softsign")
    with pytest.raises(InvalidArgumentError, match="hidden_act"):
        load_decoder(config, copy, "float32", dummy_seed=None, progress=None)


def test_progress_counts_layers(copy: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = ModelConfig.from_dir(copy)
    load_decoder(config, copy, "float32", dummy_seed=1, progress=lambda *news: seen.append(news))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_dummy_weights_depend_on_the_seed_alone(llama: Any) -> None:
    ids = [5, 6, 7]
    first = logits(load(llama.path, seed=1), ids)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(99)
    again = load(llama.path, seed=1)
    torch.set_num_threads(threads)
    assert torch.equal(logits(again, ids), first)
    assert not torch.equal(logits(load(llama.path, seed=2), ids), first)


@pytest.mark.parametrize("tied", [False, True])
def test_dummy_models_answer_prompts_differently(write_checkpoint: Any, tied: bool) -> None:
    decoder = load(write_checkpoint(tie_word_embeddings=tied).path, seed=0)
    answers = []
    for prompt in ([5, 6, 7], [100, 3], [50, 51, 52, 53, 54]):
        cache = torch.zeros(8, 3, 2, 2, 16, 16)
        ids, start = list(prompt), 0
        for _ in range(40):
            rows = [(ids[start:], start, range(8), True)]
            start = len(ids)
            ids.append(int(decoder.forward(ModelInput.from_rows(rows, 16), cache).argmax()))
        answers.append(tuple(ids[len(prompt) :]))
    assert len(set(answers)) == 3
    assert all(len(set(answer)) > 8 for answer in answers)
