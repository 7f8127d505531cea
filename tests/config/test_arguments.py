"""Command lines: a recipe, and changes of it."""

import pytest

from flowrl.config import load_config
from flowrl.config.arguments import sort_arguments
from flowrl.errors import UserError


def config_of(*words):
    arguments = sort_arguments(words)
    return load_config(arguments.recipe, arguments.overrides)


@pytest.mark.parametrize(
    "word", ["--prompts mine.txt", "--prompts=mine.txt", "prompts.train=mine.txt"]
)
def test_prompts_have_an_option(word):
    assert config_of("quickstart", *word.split()).prompts.train == "mine.txt"


def test_prompts_of_a_user_replace_what_the_recipe_says_of_its_prompts(tmp_path):
    config = config_of("tiny-sd3-nft-composite", "--prompts", "mine.txt", "--reward", "ocr")
    assert (config.prompts.balance, config.evaluation.prompts) == (None, None)
    assert config.prompts.held_out == 0.1 and config.held_out == "mine.txt"
    assert [reward.name for reward in config.rewards] == ["ocr"]
    # What stands on the command line holds, before and after --prompts.
    words = ["evaluation.prompts=b.txt", "prompts.balance=tag", "--prompts", "a.txt"]
    config = config_of("quickstart", *words)
    assert (config.evaluation.prompts, config.prompts.balance) == ("b.txt", "tag")
    recipe = tmp_path / "weights.yaml"
    recipe.write_text("extends: quickstart\nprompts: {weights: {colors: 3}}")
    assert config_of(str(recipe), "--prompts", "mine.txt").prompts.weights is None


def test_rewards_are_named_together_or_one_by_one():
    together = sort_arguments(["quickstart", "--reward", "ocr,my.own:Reward"])
    assert together == sort_arguments(["quickstart", "--reward", "ocr", "--reward=my.own:Reward"])
    rewards = load_config(together.recipe, together.overrides).rewards
    assert [reward.name for reward in rewards] == ["ocr", "my.own:Reward"]


def test_mistakes_are_named():
    for words, named in (
        (["a", "b"], "'a' and 'b'"),
        (["a", "--prompts"], "--prompts"),
        (["a", "--learning_rate", "1e-4"], "--learning_rate.*KEY=VALUE"),
        (["a", "--resum", "x"], "--resume"),
    ):
        with pytest.raises(UserError, match=named):
            sort_arguments(words)
