import pytest
import torch
from flowrl_rewards.networks import text_embeddings
from flowrl_rewards.networks.clip import Clip
from flowrl_rewards.networks.text_embeddings import TextEmbeddings


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
