import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl.config import config_yaml, load_config, parse_config
from flowrl.config.explain import explain
from flowrl.config.load import (
    OLD_NAMES,
    dump_yaml,
    find_recipe,
    load_recipe,
    load_yaml,
    merge,
    parse_overrides,
    preset_names,
)
from flowrl.errors import UserError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_scalars_are_read_as_yaml_1_2_says():
    for text in ["1e-4", "1E-4", "1.0e-4", "0.0001", "1.e-4", ".0001", "+1e-4"]:
        assert load_yaml(f"lr: {text}") == {"lr": 1e-4}
        assert load_yaml(f"[{text}]") == [1e-4]
    for text in ["no", "on", "Yes", "off", "1:30", "2026-11-21", "1_000", "TRUE"]:
        assert load_yaml(f"value: {text}") == {"value": text}
    assert load_yaml("[010, 0x1F, 0o17, -3, +4]") == [10, 31, 15, -3, 4]
    values = load_yaml("[true, false, null, ~, .inf, -.inf, .nan]")
    assert values[:6] == [True, False, None, None, math.inf, -math.inf]
    assert math.isnan(values[6])
    assert load_yaml("base: &b {x: 1, y: 2}\nmore: {<<: *b, y: 3}")["more"] == {"x": 1, "y": 3}


@given(DATA)
@example(["1e-4", "no", "1:30", "true", "~", "", "0x1F", "<<", "="])
def test_what_is_written_reads_back_equal(data):
    assert load_yaml(dump_yaml(data)) == data


def test_exotic_line_ends_survive():
    for mark in ["\x85", "\u2028", "\u2029", "\ufeff", "\n", "\r", "\t", "\x00"]:
        for text in (mark, f"a{mark}b", f"{mark} b", f"a: {mark}"):
            assert load_yaml(dump_yaml({text: [text]})) == {text: [text]}


def test_bad_yaml_and_overrides_are_one_sentence():
    for text in ["a: 1\na: 2", "x: {b: 1, c: 2, b: 3}", "x:\n  - {k: 1, k: 1}"]:
        with pytest.raises(UserError, match=r"my\.yaml, line \d.*'[abk]' is given twice"):
            load_yaml(text, "my.yaml")
    for text in ["a: [1, 2", "a: b: c", "!!python/object:os.system {}"]:
        with pytest.raises(UserError, match=r"^my\.yaml.* is not valid YAML: [^\n]*\.$"):
            load_yaml(text, "my.yaml")
    for override in ["optim.lr", "=3", "a..b=1", ".a=1"]:
        with pytest.raises(UserError, match="expected KEY=VALUE"):
            parse_overrides([override])


def test_overrides_nest_and_merge():
    assert parse_overrides(["optim.lr=1e-4", "optim.betas=[0.8, 0.9]", "name=no", "neg="]) == {
        "optim": {"lr": 1e-4, "betas": [0.8, 0.9]},
        "name": "no",
        "neg": "",
    }
    assert parse_overrides(["a.b=1", "a.b=2"]) == {"a": {"b": 2}}
    assert parse_overrides(["a=1", "a.b=2"]) == {"a": {"b": 2}}
    assert parse_overrides(["a={b: 1, c: 1}", "a.b=2"]) == {"a": {"b": 2, "c": 1}}
    assert merge({"a": {"x": 1, "y": 2}, "l": [1, 2]}, {"a": {"y": 3}, "l": [4]}) == {
        "a": {"x": 1, "y": 3},
        "l": [4],
    }
    base = {"window": {"kind": "progressive", "size": 4, "period": 25}}
    over = parse_overrides(["window.size=2", "window.kind=random"])
    assert merge(base, over) == {"window": {"kind": "random", "size": 2}}
    base = {"window": {"kind": "random", "size": 4}}
    assert merge(base, {"window": {"kind": "random", "stop": 5}})["window"]["size"] == 4
    base = {"rewards": [{"name": "ocr", "weight": 1}, {"name": "geneval"}]}
    over = parse_overrides(["rewards.0.weight=0.5"])
    assert merge(base, over)["rewards"] == [{"name": "ocr", "weight": 0.5}, {"name": "geneval"}]
    with pytest.raises(UserError, match="There is no item 2 of rewards: it has 2 items"):
        merge(base, parse_overrides(["rewards.2.weight=0.5"]))
    over = parse_overrides(["rewards=[{name: ocr}, {name: pickscore}]", "rewards.0.weight=0.5"])
    assert merge(base, over)["rewards"] == [{"name": "ocr", "weight": 0.5}, {"name": "pickscore"}]


def test_a_recipe_extends_a_file_or_a_preset(tmp_path):
    (tmp_path / "parent.yaml").write_text("a: 1\nb: {c: 2, d: 3}")
    child = tmp_path / "child.yaml"
    child.write_text("extends: parent.yaml\nb: {d: 4}")
    assert load_recipe(child, ["a=5"]) == {"a": 5, "b": {"c": 2, "d": 4}}
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\nrun: {seed: 7}")
    recipe = load_recipe(path)
    assert recipe["run"]["seed"] == 7
    assert recipe["pipeline"] == load_recipe("quickstart")["pipeline"]
    (tmp_path / "0.yaml").write_text("x: 0")
    for i in (1, 2, 3, 4):
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i - 1}.yaml")
    assert load_recipe(tmp_path / "3.yaml") == {"x": 0}
    with pytest.raises(UserError, match=r"4\.yaml has more than 3 parents"):
        load_recipe(tmp_path / "4.yaml")
    (tmp_path / "a.yaml").write_text("# nothing yet\n")
    assert load_recipe(tmp_path / "a.yaml", ["a.b=1"]) == {"a": {"b": 1}}


def test_recipes_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    with pytest.raises(UserError, match=r"a\.yaml extends itself: a\.yaml -> b\.yaml -> a\.yaml"):
        load_recipe(tmp_path / "a.yaml")
    path = tmp_path / "a.yaml"
    path.write_text("extends: [quickstart, other]")
    with pytest.raises(UserError, match="expected one preset or file"):
        load_recipe(path)
    for content in ["- a\n- b", "just text", "3"]:
        path = tmp_path / "a.yaml"
        path.write_text(content)
        with pytest.raises(UserError, match="expected keys and values"):
            load_recipe(path)
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="Cannot read the recipe"):
        load_recipe(path)
    with pytest.raises(UserError, match="Did you mean 'quickstart'"):
        find_recipe("quikstart")


def test_presets_are_listed_and_gallery_entries_can_be_run_again():
    assert "quickstart" in preset_names()
    assert not [name for name in preset_names() if name.startswith("_")]
    for path in sorted(GALLERY.glob("*/config.yaml")):
        config = load_config(path)
        assert parse_config(load_yaml(config_yaml(config))) == config
        assert path.read_text().strip() in (path.parent / "README.md").read_text()


GALLERY = Path(__file__).parents[2] / "gallery"


def test_old_option_names_work_with_one_warning(tmp_path):
    (tmp_path / "parent.yaml").write_text(
        "prompts: {train: a.txt}\nrewards: [{name: ocr}]\n"
        "rollout: {prompts: 4, steps: 6, guidance: 2.0, negative: fog, explore: {steps: 3}}\n"
        "objective: {kind: nft, draws: {count: 2}}\nevaluation: {images: 3}\nrun: {keep: 5}\n"
    )
    (tmp_path / "child.yaml").write_text(
        "extends: parent.yaml\nrollout: {num_inference_steps: 7, tree: {kind: ode}}\n"
    )
    with pytest.warns(FutureWarning) as told:
        config = load_config(
            tmp_path / "child.yaml", ["evaluation.steps=9", "objective.draws={share: image}"]
        )
    (warning,) = told
    assert "rollout.prompts is now rollout.prompts_per_iteration, " in str(warning.message)
    assert "evaluation.steps is now evaluation.num_inference_steps" in str(warning.message)
    rollout, evaluation = config.rollout, config.evaluation
    assert (rollout.prompts_per_iteration, rollout.num_inference_steps) == (4, 7)
    assert (rollout.guidance_scale, rollout.negative_prompt) == (2.0, "fog")
    assert rollout.explore.num_inference_steps == 3 and config.run.keep_checkpoints == 5
    assert (evaluation.num_images, evaluation.num_inference_steps) == (3, 9)
    assert config.objective.noising.count == 2 and config.objective.noising.share == "image"
    assert load_yaml(config_yaml(config))["rollout"]["num_inference_steps"] == 7
    for old in OLD_NAMES:
        assert explain(old) == explain(f"{old.rpartition('.')[0]}.{OLD_NAMES[old]}")
    with pytest.raises(UserError, match="steps is the old name of num_inference_steps"):
        parse_config({"rollout": {"steps": 3, "num_inference_steps": 4}})
    with pytest.raises(UserError, match="steps is the old name of num_inference_steps"):
        load_recipe("quickstart", ["rollout.steps=3", "rollout.num_inference_steps=4"])
