"""Which fields of the form are refused, and the words that the others become."""

import pytest

from flowrl.config import load_config
from flowrl.config.arguments import sort_arguments
from flowrl.scoring.spec import BUILT_IN
from flowrl.web.form import REWARDS, FieldRefusal, RunForm, checked_folder

PASTED = "\n".join(f"a red circle, number {i}" for i in range(9))


def test_fields_become_words_and_pasted_prompts_a_file_beside_the_runs(tmp_path):
    form = RunForm(
        recipe="quickstart-grpo", model=" tiny-sana ", prompts=f"\n{PASTED}\r\n  \n a cät\t!",
        reward="brightness", iterations="07", changes=("optim.lr=0.5", ""),
    )  # fmt: skip
    root = tmp_path / 'a "b" c'
    request = sort_arguments(form.words(root))
    config = load_config(request.recipe, request.overrides)
    assert (config.pipeline.path, config.run.iterations, config.optim.lr) == ("tiny-sana", 7, 0.5)
    assert [reward.name for reward in config.rewards] == ["brightness"]
    assert config.evaluation.prompts is None  # those of the recipe say nothing about these
    (file,) = root.iterdir()
    assert config.prompts.train == str(file) and file.suffix == ".txt"
    assert file.read_text() == f"{PASTED}\na cät\t!\n"
    assert form.words(root) == form.words(root) and len(list(root.iterdir())) == 1
    assert RunForm(recipe="quickstart").words(root) == ("quickstart",)


def test_each_field_that_cannot_be_used_is_named(tmp_path):
    for fields, wrong in (
        ({"recipe": "--help"}, "recipe"), ({"recipe": "none"}, "recipe"),
        ({"prompts": "too\nfew"}, "prompts"),
        ({"prompts": PASTED, "prompt_file": str(tmp_path)}, "prompt_file"),
        ({"reward": "none"}, "reward"), ({"reward": "a:b, {name: c"}, "reward"),
        ({"reward": "--yes"}, "reward"), ({"iterations": "1 x=2"}, "form"),
        ({"changes": ("--yes",)}, "changes"), ({"changes": ("run.output_dir=/",)}, "changes"),
        ({"changes": ("optim.lr=fast",)}, "form"),
    ):  # fmt: skip
        with pytest.raises(FieldRefusal) as refusal:
            RunForm(**{"recipe": "quickstart"} | fields).words(tmp_path)
        assert refusal.value.field == wrong and "\n" not in str(refusal.value), fields
    assert list(tmp_path.iterdir()) == []  # nothing is written then


def test_a_run_gets_a_new_folder_beside_the_others(tmp_path):
    (tmp_path / "old").mkdir()
    assert checked_folder(tmp_path, "new") == tmp_path / "new"
    for name in ("old", "../x", "/x", "", ".hidden", "a/b", "-x", "a\n"):
        with pytest.raises(FieldRefusal) as refusal:
            checked_folder(tmp_path, name)
        assert refusal.value.field == "folder", name


def test_every_built_in_reward_is_offered_with_what_it_needs():
    assert set(REWARDS) == set(BUILT_IN)
