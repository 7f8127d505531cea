"""Models, detections and forwards are counted: what rewards share is made and run once."""

import gc
from collections import Counter
from weakref import WeakValueDictionary

import pytest
import torch
from flowrl_rewards.aesthetic import Aesthetic
from flowrl_rewards.clipscore import CLIPScore
from flowrl_rewards.detectors.tiny import TinyDetector
from flowrl_rewards.fixtures import square
from flowrl_rewards.geneval import GenEval
from flowrl_rewards.networks import text_embeddings
from flowrl_rewards.networks.clip import Clip
from flowrl_rewards.networks.text_embeddings import TextEmbeddings
from transformers import CLIPModel

from flowrl.assembly.learner import build_rewards
from flowrl.config import load_config
from flowrl.config.rewards import RewardOptions
from flowrl.scoring.scorer import score

RED = {"tag": "colors", "include": [{"class": "square", "count": 1, "color": "red"}]}
MODES = ("partial", "strict", "official")


@pytest.fixture
def counts(monkeypatch) -> Counter[str]:
    """How often networks are read, images encoded, texts encoded, and images shown a detector."""
    # Rewards that other tests keep hold networks and answers of their own.
    monkeypatch.setattr("flowrl_rewards.networks.sharing._places", WeakValueDictionary())
    found = Counter[str]()

    def count(owner, name: str, what: str, size=lambda *_: 1) -> None:
        real = getattr(owner, name)

        def counted(*args, **kwargs):
            found[what] += size(*args)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(CLIPModel, "from_pretrained", "loads")
    count(CLIPModel, "get_image_features", "image forwards")
    count(CLIPModel, "get_text_features", "text forwards")
    count(TinyDetector, "__init__", "detectors")
    count(TinyDetector, "__call__", "detected", lambda _, images: len(images))
    return found


def test_three_rules_of_geneval_look_at_each_image_once(counts):
    images = torch.stack([square("red", 64), square("blue", 64), square("red", 64) * 0.9])
    alone = [GenEval(mode)(images, [""] * 3, [RED] * 3)[0] for mode in MODES]
    gc.collect()
    counts.clear()
    entries = [RewardOptions(name="geneval", args={"mode": mode}) for mode in MODES]
    specs = build_rewards(load_config("quickstart").model_copy(update={"rewards": entries}))
    result = score(specs, images, ["a red square"] * 3, [RED] * 3)
    assert result.names == ("geneval", "geneval_strict", "geneval_official")
    assert torch.equal(result.scores, torch.stack(alone, 1))
    assert (counts["detectors"], counts["detected"]) == (1, 3)


def test_clipscore_and_aesthetic_share_one_network_and_its_forward(
    counts, tiny_clip, tiny_aesthetic, random_images
):
    settings = {"model": tiny_clip, "device": "cpu"}
    headed = settings | {"head": tiny_aesthetic}
    images, asked = random_images(4), (["a cat"] * 4, [{}] * 4)
    alone = torch.stack(
        [CLIPScore(**settings)(images, *asked), Aesthetic(**headed)(images, *asked)]
    )
    gc.collect()
    counts.clear()
    rewards = CLIPScore(**settings), Aesthetic(**headed)
    together = torch.stack([reward(images, *asked) for reward in rewards])
    assert torch.equal(together, alone)
    assert (counts["loads"], counts["image forwards"], counts["text forwards"]) == (1, 1, 1)
    for reward in rewards:  # others: nothing is taken for what it is not
        assert not torch.equal(reward(images.flip(0), *asked), reward(images, *asked))
    assert counts["image forwards"] == 2
    leaf = images.clone().requires_grad_()
    for reward in rewards:  # each has a graph of its own
        assert torch.autograd.grad(reward(leaf, *asked).sum(), leaf)[0].any()


def test_equal_prompts_are_encoded_once_and_come_back_in_place(monkeypatch):
    calls = []

    def numbered(texts):
        """Each text has the next number."""
        calls.append(list(texts))
        seen = sum(map(len, calls)) - len(texts)
        return torch.arange(seen, seen + len(texts)).float()[:, None]

    texts = TextEmbeddings(numbered)
    assert texts(["a", "b", "a", "a"]).flatten().tolist() == [0, 1, 0, 0]
    assert texts(["c", "a"]).flatten().tolist() == [2, 0]
    assert calls == [["a", "b"], ["c"]]
    monkeypatch.setattr(text_embeddings, "LIMIT", 2)
    assert texts(["c"]).item() == 3  # beyond the limit all are encoded anew


def test_long_prompts_are_cut_with_a_warning(tiny_clip):
    clip, long = Clip(tiny_clip, reward="a test", device="cpu"), "a red circle " * 9
    with pytest.warns(UserWarning, match=r"a test reads 14 tokens .* prompt of 29"):
        cut = clip.texts([long])
    assert cut.isfinite().all() and (cut == clip.texts([long])).all()
