"""Encoded prompts on disk: what was written comes back bit for bit, or not at all."""

import logging

import pytest
import torch

from flowrl.backbones.text_cache import PromptCache
from flowrl.trajectory import Conditioning

TEXT = ("a red circle", "")


@pytest.fixture
def cond():
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(1, 5, 4, generator=generator)
    tensors = {
        "embeds": embeds.bfloat16(),
        "pooled": embeds[:, 0],
        "mask": torch.tensor([[1, 1, 0]]),
        "flags": torch.tensor([[True, False]]),
        "strided": embeds.transpose(1, 2),
    }
    return Conditioning(tensors=tensors)


@pytest.fixture
def cache(tmp_path):
    return PromptCache(tmp_path, {"pipeline": "a"})


def same(a, b):
    return a.tensors.keys() == b.tensors.keys() and all(
        a.tensors[k].dtype == b.tensors[k].dtype and torch.equal(a.tensors[k], b.tensors[k])
        for k in a.tensors
    )


def test_files_are_those_of_prompt_negative_and_key(cache, cond, tmp_path):
    assert cache.load(*TEXT) is None and not cache.has(*TEXT)
    cache.save(*TEXT, cond)
    assert cache.has(*TEXT)
    assert same(PromptCache(tmp_path, {"pipeline": "a"}).load(*TEXT), cond)
    assert [p.suffix for p in tmp_path.rglob("*") if p.is_file()] == [".safetensors"]
    cache.save(*TEXT, cond)
    assert not cache.has(TEXT[0], "ugly") and not cache.has("a red square", "")
    assert not PromptCache(tmp_path, {"pipeline": "b"}).has(*TEXT)
    assert not PromptCache(tmp_path, {"pipeline": "a", "guided": True}).has(*TEXT)


def test_a_damaged_file_is_told_and_counts_as_none(cache, cond, caplog):
    for name, damage in {
        "cut": lambda data: data[:-1],
        "changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "header lost": lambda data: b"\xff" * 64 + data[64:],
    }.items():
        cache.save(*TEXT, cond)
        path = cache.path(*TEXT)
        path.write_bytes(damage(path.read_bytes()))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert cache.load(*TEXT) is None
        assert "damaged" in caplog.text
        assert cache.has(*TEXT) is (name == "changed")  # `has` reads no content
        cache.save(*TEXT, cond)
        assert same(cache.load(*TEXT), cond)
