"""The memory of encoded prompts, with and without a disk, with and without encoders."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flowrl.backbones import offload
from flowrl.backbones import text_cache as encode
from flowrl.backbones.offload import visiting
from flowrl.backbones.text_cache import PromptCache, TextCache
from flowrl.build import backbone as build_memory
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
        self.device, self.asked, self.autocast, self.seen = torch.device("cpu"), [], [], []

    def encode(self, prompts, negatives):
        self.asked += list(zip(prompts, negatives, strict=True))
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        self.seen.append(self.pipeline.text_encoder.weight.device.type)
        sizes = [[len(p), len(n)] for p, n in zip(prompts, negatives, strict=True)]
        return Conditioning(tensors={"size": torch.tensor(sizes)})


def records(*texts):
    return [PromptRecord(uid=text, text=text) for text in texts]


def test_each_text_is_encoded_once_and_comes_in_the_order_asked():
    backbone = Backbone()
    cache = TextCache(backbone, negative="no")
    assert cache(records("abc", "a", "abc")).tensors["size"].tolist() == [[3, 2], [1, 2], [3, 2]]
    cache(records("a"))
    assert backbone.asked == [("abc", "no"), ("a", "no")]


def test_beyond_its_capacity_the_oldest_are_forgotten_and_none_without_one():
    backbone = Backbone()
    cache = TextCache(backbone, capacity=2)
    cache(records("a", "bb", "ccc"))
    assert [cache.has(r) for r in records("a", "bb", "ccc")] == [False, True, True]
    endless = TextCache(backbone, capacity=None)
    endless(records(*map(str, range(9))))
    assert len(endless.known) == 9 and endless.nbytes() == 9 * 16


def test_what_is_on_disk_needs_no_encoder(tmp_path):
    backbone = Backbone()
    first = TextCache(backbone, disk=PromptCache(tmp_path, {}))
    fresh = first(records("a", "bb"))
    again = TextCache(backbone, disk=PromptCache(tmp_path, {}))
    backbone.pipeline.text_encoder = None
    assert torch.equal(again(records("a", "bb")).tensors["size"], fresh.tensors["size"])
    assert len(backbone.asked) == 2


def test_what_is_learned_to_disk_is_not_kept_in_memory_beyond_the_capacity(tmp_path):
    cache = TextCache(Backbone(), disk=PromptCache(tmp_path, {}), capacity=1)
    cache.learn(records("a", "bb", "ccc"))
    assert len(cache.known) == 1 and all(cache.has(r) for r in records("a", "bb", "ccc"))


def test_an_unknown_prompt_without_encoders_is_told():
    backbone = Backbone()
    cache = TextCache(backbone)
    cache.learn(records("a"))
    backbone.pipeline.text_encoder = None
    assert len(cache(records("a")))
    with pytest.raises(UserError, match="'b' is not among .* freed: .* offload or keep"):
        cache(records("a", "b"))


def test_encoders_visit_the_device_while_they_encode_and_only_then(monkeypatch):
    backbone = Backbone()
    meta = torch.device("meta")  # stands for another device
    monkeypatch.setattr(encode, "visiting", lambda parts, _: visiting(parts, meta))
    TextCache(backbone).learn(records("a"))
    assert backbone.seen == ["meta"]
    assert backbone.pipeline.text_encoder.weight.device.type == "cpu"


@pytest.fixture
def copies(monkeypatch):
    """The weights that were moved to another device, for which `meta` stands."""
    moved, copy, meta = [], offload._copy, torch.device("meta")
    monkeypatch.setattr(encode, "visiting", lambda parts, _: visiting(parts, meta))
    monkeypatch.setattr(build_memory, "visiting", lambda parts, _: visiting(parts, meta))
    monkeypatch.setattr(offload, "_copy", lambda t, device: moved.append(t) or copy(t, device))
    return moved


def test_encoders_move_once_for_many_batches(copies):
    cache = TextCache(Backbone(), batch_size=1)
    cache.learn(records("a", "bb", "ccc"))
    assert len(copies) == 1 and cache.backbone.seen == ["meta"] * 3
    cache.learn(records("a", "bb"))
    assert len(copies) == 1  # nothing to do
    build_memory._encode([(cache, r) for r in records("d", "ee")], show=False)
    assert len(copies) == 2 and len(cache.known) == 5


def test_no_more_is_learned_than_can_be_kept():
    cache = TextCache(Backbone(), capacity=2)
    cache.learn(records("a", "bb", "ccc"))
    assert len(cache.backbone.asked) == len(cache.known) == 2


def test_a_damaged_file_is_seen_when_read_to_the_end_and_named_without_encoders(tmp_path):
    backbone, (prompt,) = Backbone(), records("a")
    TextCache(backbone, disk=PromptCache(tmp_path, {})).learn([prompt])
    (path,) = tmp_path.rglob("*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    cache = TextCache(backbone, disk=PromptCache(tmp_path, {}))
    assert cache.has(prompt) and not cache.has(prompt, whole=True)
    encoder, backbone.pipeline.text_encoder = backbone.pipeline.text_encoder, None
    with pytest.raises(UserError, match=f"{path.name} is damaged.*: remove the file and start"):
        cache([prompt])
    backbone.pipeline.text_encoder = encoder
    cache.make([prompt])
    assert TextCache(backbone, disk=PromptCache(tmp_path, {})).has(prompt, whole=True)


def test_texts_are_encoded_in_the_encoders_own_dtype_under_autocast_too():
    backbone = Backbone()
    with torch.autocast("cpu", torch.bfloat16):
        TextCache(backbone)(records("a"))
        assert torch.is_autocast_enabled("cpu")
    assert backbone.autocast == [False]
