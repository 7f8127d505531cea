"""How alike the images of different wordings are."""

import math

import pytest
import torch
from flowrl_rewards.agreement import WordingAgreement
from flowrl_rewards.diversity import cells_of
from hypothesis import given
from hypothesis import strategies as st

from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.sampling.rollout import Timer
from flowrl.scoring.scorer import quantise
from flowrl.utils.distributed import Runtime


def noises(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@given(wordings=st.lists(st.sampled_from("abc"), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_a_score_is_the_mean_similarity_to_images_of_other_wordings(wordings, seed):
    images, count = noises(len(wordings), seed), len(wordings)
    scores, reasons = WordingAgreement()(images, ["p"] * count, [{"wording": w} for w in wordings])
    cells = cells_of(images)
    for i, score in enumerate(scores):
        rivals = [j for j in range(count) if wordings[j] != wordings[i]]
        alike = [1 - (cells[i] - cells[j]).abs().mean().item() for j in rivals]
        assert (i in reasons) == math.isnan(score) == (not rivals)
        assert not rivals or score == pytest.approx(sum(alike) / len(rivals))


def test_without_wordings_all_images_are_compared():
    images = noises(1, 0).expand(3, -1, -1, -1)
    assert WordingAgreement()(images, ["p"] * 3, [{}] * 3) == ([1.0] * 3, {})


def test_a_network_compares_directions_of_its_vectors(tiny_clip):
    reward, images = WordingAgreement(tiny_clip, device="cpu"), noises(3, 1)
    vectors = reward.clip.images(images)
    scores, _ = reward(images, ["p"] * 3, [{}] * 3)
    wanted = [(vectors[i] @ vectors[j] + vectors[i] @ vectors[k]) / 2
              for i, j, k in ((0, 1, 2), (1, 0, 2), (2, 0, 1))]  # fmt: skip
    assert scores == pytest.approx([w.item() for w in wanted])


def test_in_training_images_come_with_the_words_that_they_were_made_of(tiny_config, load_tiny):
    config = tiny_config(
        rewards=[{"name": "brightness"}, {"name": "agreement"}],
        prompts={"train": "tiny:geneval:train", "refiner": {"own_words": 2}},
        rollout={"prompts_per_iteration": 1, "group_size": 4},
    )
    learner = build_learner(config, Runtime(device="cpu"), ProvidedObjects(pipeline=load_tiny()))
    rollout = learner.source.collect(0, Timer())
    cells, column = cells_of(quantise(rollout.images)), rollout.names.index("agreement")
    # Two images share the prompt's own words: each is compared with the other two alone.
    alike = 1 - (cells[0] - cells[2:]).abs().mean(-1)
    assert rollout.scores[0, column].item() == pytest.approx(alike.mean().item())
