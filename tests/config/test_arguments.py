"""Command lines: a recipe, overrides, and the names that diffusers' scripts use."""

import pytest

from flowrl.config import Config, load_config
from flowrl.config.arguments import ALIASES, sort_arguments
from flowrl.config.messages import walk
from flowrl.errors import UserError


def config_of(*words):
    arguments = sort_arguments(words)
    return load_config(arguments.recipe, arguments.overrides)


def test_every_alias_leads_to_an_option():
    assert set(ALIASES.values()) <= {option.path for option in walk(Config)}


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("--learning_rate 1e-4", "optim.lr", 1e-4),
        ("--learning-rate=1e-4", "optim.lr", 1e-4),
        ("learning_rate=1e-4", "optim.lr", 1e-4),
        ("--optim.lr 1e-4", "optim.lr", 1e-4),
        ("--mixed_precision no", "pipeline.dtype", "fp32"),
        ("--resolution 128", "pipeline.width", 128),
        ("--report_to wandb", "run.trackers", ["wandb"]),
        ("--report_to none", "run.trackers", []),
        ("--prompts mine.txt", "prompts.train", "mine.txt"),
        ("--gradient_checkpointing", "memory.gradient_checkpointing", True),
        ("--gradient_checkpointing false", "memory.gradient_checkpointing", False),
    ],
)
def test_names_from_diffusers_scripts_are_understood(words, path, value):
    node = config_of("quickstart", *words.split())
    for part in path.split("."):
        node = getattr(node, part)
    assert node == value


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


def test_resume_is_taken_out_and_mistakes_are_named():
    assert sort_arguments(["--resume_from_checkpoint", "latest", "a"]).resume == "latest"
    for words, named in (
        (["a", "b"], "'a' and 'b'"),
        (["a", "--learning_rate"], "--learning_rate"),
        (["a", "--resum", "x"], "--resume"),
    ):
        with pytest.raises(UserError, match=named):
            sort_arguments(words)
