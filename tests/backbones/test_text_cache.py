"""The memory of encoded prompts, with and without a disk and encoders; whose encoders they are."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flowrl.assembly.text import TextCaches
from flowrl.backbones.text_cache import (
    PromptCache,
    TextCache,
    identify_by_files,
)
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.trajectory import Conditioning


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))


class Pipeline(SimpleNamespace):
    @property
    def components(self):
        return vars(self)


class Backbone:
    """Encodes a prompt as its length; remembers what it was asked."""

    def __init__(self):
        self.pipeline = Pipeline(text_encoder=Encoder(), vae=None)
        self.device, self.asked = torch.device("cpu"), []

    def encode(self, prompts, negatives):
        self.asked += list(zip(prompts, negatives, strict=True))
        sizes = [[len(p), len(n)] for p, n in zip(prompts, negatives, strict=True)]
        return Conditioning(tensors={"size": torch.tensor(sizes)})


def records(*texts):
    return [PromptRecord(uid=text, text=text) for text in texts]


def test_each_text_is_encoded_once_and_comes_in_the_order_asked():
    backbone = Backbone()
    cache = TextCache(backbone, negative="no")
    assert cache(records("abc", "a")).tensors["size"].tolist() == [[3, 2], [1, 2]]
    assert cache(records("a", "a", "abc")).tensors["size"].tolist() == [[1, 2], [1, 2], [3, 2]]
    assert backbone.asked == [("abc", "no"), ("a", "no")]


def test_as_many_texts_are_encoded_at_once_however_many_of_them_are_new():
    """Or a resumed run, to which more are new, would get other last bits."""
    for before in ((), ("a",), ("a", "b")):
        backbone = Backbone()
        cache = TextCache(backbone)
        cache.make(records(*before))
        backbone.asked.clear()
        cache(records("a", "b", "c"))
        assert len(backbone.asked) == 3
        assert {text for text, _ in backbone.asked} == {"a", "b", "c"} - {*before}


def test_beyond_its_capacity_the_oldest_are_forgotten_and_none_without_one():
    backbone = Backbone()
    cache = TextCache(backbone, capacity=2)
    cache(records("a", "bb", "ccc"))
    assert [cache.has(r) for r in records("a", "bb", "ccc")] == [False, True, True]
    cache(records("bb", "a"))  # the one that was used last stays
    assert [text for text, _ in cache.encoded] == ["bb", "a"]
    endless = TextCache(backbone, capacity=None)
    endless(records(*map(str, range(9))))
    assert len(endless.encoded) == 9


def test_an_unknown_prompt_without_encoders_is_told():
    backbone = Backbone()
    cache = TextCache(backbone)
    cache.make(records("a"))
    backbone.pipeline.text_encoder = None
    cache.use(backbone)
    assert len(cache(records("a")))
    with pytest.raises(UserError, match="'b' is not among .* freed: .* offload or keep"):
        cache(records("a", "b"))


def test_a_damaged_file_is_seen_when_read_to_the_end_and_named_without_encoders(tmp_path):
    backbone, (prompt,) = Backbone(), records("a")
    TextCache(backbone, disk=PromptCache(tmp_path, {})).make([prompt])
    (path,) = tmp_path.rglob("*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    encoder, backbone.pipeline.text_encoder = backbone.pipeline.text_encoder, None
    cache = TextCache(backbone, disk=PromptCache(tmp_path, {}))
    assert cache.has(prompt) and not cache.has(prompt, whole=True)
    with pytest.raises(UserError, match=f"remove .*{path.name}, which is damaged"):
        cache([prompt])
    backbone.pipeline.text_encoder = encoder
    cache.use(backbone)
    cache.make([prompt])
    assert TextCache(backbone, disk=PromptCache(tmp_path, {})).has(prompt, whole=True)


def test_a_change_of_an_encoder_or_tokenizer_is_seen_and_of_other_parts_is_not(tmp_path):
    index = tmp_path / "model_index.json"
    index.write_text(
        '{"_class_name": "X", "text_encoder": ["a", "B"], "text_encoder_2": ["a", "B"], "vae": []}'
    )
    for name in ("text_encoder", "text_encoder_2", "tokenizer", "transformer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("1")
    before = identify_by_files(index)
    (tmp_path / "transformer" / "weights").write_text("more")
    assert identify_by_files(index) == before
    (tmp_path / "tokenizer" / "weights").write_text("more")
    longer = identify_by_files(index)
    assert longer != before
    os.utime(tmp_path / "text_encoder_2" / "weights", ns=(1, 1))
    assert identify_by_files(index) != longer
    index = tmp_path / "models--a--b" / "snapshots" / "0123abcd" / "model_index.json"
    assert identify_by_files(index) == {"commit": "0123abcd"}


def test_encoders_of_a_pipeline_object_are_not_kept_on_disk(tiny_config, load_tiny, tmp_path):
    config = tiny_config(memory={"prompt_cache": str(tmp_path)})
    with pytest.raises(UserError, match="memory.prompt_cache"):
        TextCaches(config, load_tiny())


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
    for damage in (
        lambda data: data[:-1],  # cut
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),  # changed
        lambda data: b"\xff" * 64 + data[64:],  # header lost
    ):
        cache.save(*TEXT, cond)
        path = cache.path(*TEXT)
        path.write_bytes(damage(path.read_bytes()))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert cache.load(*TEXT) is None
        assert "damaged" in caplog.text
        assert cache.has(*TEXT)  # which reads no content
        cache.save(*TEXT, cond)
        assert same(cache.load(*TEXT), cond)
