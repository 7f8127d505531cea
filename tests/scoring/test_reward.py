import subprocess
import sys

import pytest
import torch

from flowrl.errors import UserError
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.spec import BUILT_IN, RewardSpec, load_reward, trained

GREY = torch.full((4, 3, 8, 8), 0.5)
PROMPTS = ["a", "b", "c", "d"]
PLAIN: list[dict] = [{}, {}, {}, {}]


def constant(images, prompts, metadata):
    return [0.25] * len(images)


class Tagged:
    """Speaks of prompts with a tag only, and of no cats."""

    required_metadata = ("tag",)

    def applies(self, prompt, metadata):
        return "cat" not in prompt

    def __call__(self, images, prompts, metadata):
        return [1.0] * len(images)


class Rivals:
    scope = "group"

    def __call__(self, images, prompts, metadata):
        return [0.0] * len(images)


def test_a_reward_applies_where_metadata_and_recipe_say():
    spec = RewardSpec(name="r", reward=Tagged())
    assert spec.applies("a dog", {"tag": "x"})
    assert not spec.applies("a dog", {})
    assert not spec.applies("a cat", {"tag": "x"})
    assert RewardSpec(name="c", reward=constant).applies("a cat", {})
    # A recipe may keep a reward to some prompts and never add any.
    only = {"tag": ("ocr", "colors"), "lang": ("en",)}
    spec = RewardSpec(name="r", reward=Tagged(), applies_to=only)
    assert spec.applies("a dog", {"tag": "ocr", "lang": "en"})
    assert not spec.applies("a dog", {"tag": "ocr"})
    assert not spec.applies("a dog", {"tag": "counting", "lang": "en"})
    assert not spec.applies("a cat", {"tag": "ocr", "lang": "en"})
    # Trained are those with a weight that are not held out.
    specs = [
        RewardSpec(name="a", reward=constant, weight=-1.0),
        RewardSpec(name="b", reward=constant, held_out=True),
        RewardSpec(name="c", reward=constant, weight=0.0),
    ]
    assert trained(specs) == specs[:1]
    # Rewards say whether they compare groups and are asked here by default.
    plain, rivals = (RewardSpec(name="r", reward=r) for r in (constant, Rivals()))
    assert rivals.whole_groups and not plain.whole_groups
    asked = plain.get_executor()
    assert isinstance(asked, InlineExecutor) and asked.reward is constant
    own = InlineExecutor(constant, "own")
    assert RewardSpec(name="r", reward=constant, executor=own).get_executor() is own


JUDGES = ("vlm_judge", "vlm_questions", "pairwise")
SERVER = {"server": {"model": "judge", "base_url": "http://127.0.0.1:8000/v1"}}


def test_rewards_are_loaded_by_name_or_path_with_arguments():
    # Every built in loads by name.
    for name in BUILT_IN:
        assert callable(load_reward(name, SERVER if name in JUDGES else {}))
    # Loading passes arguments and finds functions and classes by path.
    assert load_reward("geneval", {"mode": "strict"}).mode == "strict"  # pyright: ignore
    assert load_reward(f"{__name__}:constant") is constant
    bound = load_reward(f"{__name__}:scaled", {"factor": 2.0})
    assert bound(GREY, PROMPTS, PLAIN) == [2.0] * 4
    assert isinstance(load_reward(f"{__name__}:Tagged"), Tagged)
    # A reward that cannot be loaded is a sentence.
    for name, args, message in [
        ("genevall", {}, "unknown reward 'genevall': use one of geneval"),
        ("no_such_package:Thing", {}, "no such package was found"),
        ("flowrl_rewards.ocr:Missing", {}, "the package found lies at"),
        ("flowrl_rewards.nothing:Thing", {}, "the package found lies at"),
        ("math:pi", {}, "expected a class or a function"),
        ("geneval", {"mode": "lenient"}, "does not accept"),
        ("geneval", {"moed": "strict"}, "does not accept"),
    ]:
        with pytest.raises(UserError) as error:
            load_reward(name, args)
        assert message in str(error.value)


def scaled(images, prompts, metadata, factor=1.0):
    return [factor] * len(images)


def test_whatever_a_module_of_ones_own_raises_is_a_sentence(tmp_path, monkeypatch):
    for text, says in [
        ("undefined_name", "NameError: name 'undefined_name' is not defined"),
        ("def (", "SyntaxError: "),
        ("{}['key']", "KeyError: 'key'"),
        ("raise LookupError", "LookupError"),
        ("assert False, 'no'", "AssertionError: no"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("class Mine:\n  def __init__(self): raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("class Mine:\n  def __init__(self): {}['key']", "KeyError: 'key'"),
        ("class Mine:\n  def __init__(self): raise ImportError('no cv2')", "ImportError: no cv2"),
        ("class Mine:\n  def __init__(self): raise NotImplementedError", "NotImplementedError"),
    ]:
        monkeypatch.syspath_prepend(tmp_path)
        name = f"broken_reward_{abs(hash(text))}"  # a module that was imported is not read again
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(UserError) as error:
            load_reward(f"{name}:Mine")
        assert f"'{name}:Mine'" in str(error.value) and says in str(error.value)
        assert "\n" not in str(error.value)
        assert error.value.__cause__ is not None
        sys.modules.pop(name, None)


def test_what_people_are_told_by_a_reward_itself_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "from flowrl.errors import UserError\ndef mine(): ...\nclass Mine:\n"
    text += "  def __init__(self): raise UserError('no key: set KEY')\n"
    (tmp_path / "telling_reward.py").write_text(text)
    with pytest.raises(UserError, match="^no key: set KEY$"):
        load_reward("telling_reward:Mine")


def test_loading_a_reward_starts_no_engine():
    code = (
        "import sys; from flowrl.scoring.spec import load_reward; load_reward('ocr'); "
        "load_reward('geneval'); sys.exit('rapidocr' in sys.modules or 'cv2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
