"""Rewards are loaded by name or path, and say which prompts they are for."""

import pytest
import torch

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, load_prompts, records_of
from flowrl.scoring.spec import (
    RewardSpec,
    check_evaluation,
    check_prompts,
    load_reward,
)


class Tagged:
    """Applies to prompts with a tag, and to no cats."""

    required_metadata = ("tag",)

    def applies(self, prompt, metadata):
        return "cat" not in prompt

    def __call__(self, images, prompts, metadata):
        return [1.0] * len(images)


def test_a_reward_applies_where_its_metadata_its_code_and_the_recipe_say():
    spec = RewardSpec(name="r", reward=Tagged())
    assert spec.applies("a dog", {"tag": "x"}) and not spec.applies("a dog", {})
    assert not spec.applies("a cat", {"tag": "x"})
    limits = {"tag": ("ocr", "colors"), "lang": ("en",)}
    spec = RewardSpec(name="r", reward=Tagged(), applies_to=limits)
    assert spec.applies("a dog", {"tag": "ocr", "lang": "en"})
    assert not spec.applies("a dog", {"tag": "ocr"})
    assert not spec.applies("a dog", {"tag": "counting", "lang": "en"})


USERS = {  # modules of users that cannot be loaded
    "key": "{}['key']",
    "imports": "import no_such_thing",
    "raises": "class Mine:\n  def __init__(self): raise NotImplementedError",
    "told": "from flowrl.errors import UserError\nclass Mine:\n"
    "  def __init__(self): raise UserError('no key: set KEY')",
}


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("genevall", {}, "did you mean geneval"),
        ("no_such_package:Thing", {}, "no such package"),
        ("flowrl_rewards.ocr:Missing", {}, "flowrl_rewards"),
        ("math:pi", {}, "class or a function"),
        ("geneval", {"moed": "strict"}, "moed"),
        ("geneval", {"mode": "lenient"}, "lenient"),
        ("users_key:Mine", {}, "KeyError: 'key'"),
        ("users_imports:Mine", {}, "No module named 'no_such_thing'"),
        ("users_raises:Mine", {}, "NotImplementedError"),
        ("users_told:Mine", {}, "^no key: set KEY$"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_sentence(name, args, words, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for module, text in USERS.items():
        (tmp_path / f"users_{module}.py").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        load_reward(name, args)
    assert "\n" not in str(caught.value)


class Loud:
    """Changes settings where it is made and where it is asked about a prompt."""

    def __init__(self):
        torch.set_default_dtype(torch.float64)

    def applies(self, prompt, metadata):
        torch.set_grad_enabled(False)
        return True

    def check(self, prompt, metadata):
        torch.set_num_threads(7)


def test_what_loading_and_checking_a_reward_changes_in_the_process_is_restored():
    before = torch.get_num_threads()
    with pytest.warns(UserWarning, match="reward") as caught:
        spec = RewardSpec(name="loud", reward=load_reward(f"{__name__}:Loud"))
        assert torch.get_default_dtype() == torch.float32
        check_prompts([spec], records_of([{"prompt": "a"}]))
    assert torch.is_grad_enabled() and torch.get_num_threads() == before
    assert {str(w.message).rpartition(": ")[2] for w in caught} == {
        "torch.set_default_dtype", "torch.set_grad_enabled", "torch.set_num_threads",
    }  # fmt: skip


def test_prompts_that_rewards_cannot_score_are_named_before_training():
    geneval, ocr, plain = (
        RewardSpec(name=name, reward=reward)
        for name, reward in (
            ("geneval", load_reward("geneval")), ("ocr", load_reward("ocr")),
            ("any", lambda *_: [0.25]),
        )
    )  # fmt: skip
    mixed, cat = load_prompts("tiny:all:test", limit=14), PromptRecord(uid="0", text="a cat")
    bench = PromptRecord(
        uid="0", text="a photo of a bench",
        metadata={"tag": "single_object", "include": [{"class": "bench", "count": 1}]},
    )  # fmt: skip
    check_prompts([geneval, ocr], mixed)
    check_prompts([plain], [cat])
    for specs, prompts, words in (
        ([geneval], mixed, "no reward applies to the prompt"),
        ([geneval, ocr], [p for p in mixed if p.metadata["tag"] != "ocr"], "'ocr'"),
        ([geneval], [bench], "'bench'"),
    ):
        with pytest.raises(UserError, match=words):
            check_prompts(specs, prompts)
    for prompts, words in (([bench], "'bench'"), ([cat], "evaluation.prompts")):
        with pytest.raises(UserError, match=words):
            check_evaluation([geneval], prompts)
    check_evaluation([geneval], [cat, *load_prompts("tiny:colors:test", limit=1)])
    check_evaluation([geneval], [])
