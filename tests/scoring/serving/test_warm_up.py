"""What is served has been loaded before, if there is a way."""

import pytest
import torch
from flowrl_rewards.fixtures import fixture

from flowrl.errors import UserError
from flowrl.scoring.check import GENERIC
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.server import warm_up
from flowrl.scoring.spec import RewardSpec

IMAGES = torch.zeros(3, 3, 8, 8)


class Imaged:
    """Has fixtures as given, and remembers what it is asked."""

    def __init__(self, *fixtures, applies=True, score=1.0, scope="sample"):
        self.entries, self.scope, self.score = list(fixtures), scope, score
        self.says = applies
        self.asked: list[tuple[int, list[str]]] = []

    def applies(self, prompt, metadata):
        return self.says

    def fixtures(self):
        return self.entries

    def __call__(self, images, prompts, metadata):
        self.asked.append((len(images), prompts))
        return [self.score] * len(images)


def warmed(reward) -> bool:
    return warm_up(RewardSpec(name="mine", reward=reward, executor=InlineExecutor(reward, "mine")))


def test_a_reward_without_an_own_image_is_loaded_with_any_that_it_applies_to():
    reward = Imaged()
    assert warmed(reward) and reward.asked == [(4, [GENERIC[0].text] * 4)]
    silent = Imaged(applies=False)
    assert not warmed(silent) and not silent.asked
    with pytest.raises(UserError, match="'mine' cannot score a plain image: .*no finite number"):
        warmed(Imaged(score=None))


def test_a_reward_that_compares_groups_is_loaded_with_a_whole_one():
    reward = Imaged(fixture("odd", *IMAGES[:2], "p", others=[IMAGES[2]]), scope="group")
    assert warmed(reward) and reward.asked == [(3, ["p"] * 3)]


def test_a_reward_that_cannot_score_its_own_image_is_not_served():
    def broken(images, prompts, metadata):
        raise OSError("no weights")

    broken.fixtures = lambda: [fixture("it works", IMAGES[0], IMAGES[1], "a prompt")]
    with pytest.raises(UserError, match="'mine' cannot score its own fixture 0: OSError: no w"):
        warmed(broken)
