import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl.config.load import (
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


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "1.e-4", ".0001", "+1e-4"])
def test_a_float_is_a_float_however_it_is_written(text):
    assert load_yaml(f"lr: {text}") == {"lr": 1e-4}
    assert load_yaml(f"[{text}]") == [1e-4]


@pytest.mark.parametrize("text", ["no", "on", "Yes", "off", "1:30", "2026-11-21", "1_000", "TRUE"])
def test_what_older_yaml_would_turn_into_something_else_stays_text(text):
    assert load_yaml(f"value: {text}") == {"value": text}


def test_whole_numbers_are_decimal_unless_marked():
    assert load_yaml("[010, 0x1F, 0o17, -3, +4]") == [10, 31, 15, -3, 4]


def test_special_scalars():
    values = load_yaml("[true, false, null, ~, .inf, -.inf, .nan]")
    assert values[:6] == [True, False, None, None, math.inf, -math.inf]
    assert math.isnan(values[6])


@given(DATA)
@example(["1e-4", "no", "1:30", "true", "~", "", "0x1F", "<<", "="])
def test_what_is_written_reads_back_equal(data):
    assert load_yaml(dump_yaml(data)) == data


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029", "\ufeff", "\n", "\r", "\t", "\x00"])
def test_exotic_line_ends_survive(mark):
    for text in (mark, f"a{mark}b", f"{mark} b", f"a: {mark}"):
        assert load_yaml(dump_yaml({text: [text]})) == {text: [text]}


@pytest.mark.parametrize("text", ["a: 1\na: 2", "x: {b: 1, c: 2, b: 3}", "x:\n  - {k: 1, k: 1}"])
def test_a_key_given_twice_is_an_error_that_names_key_and_line(text):
    with pytest.raises(UserError, match=r"my\.yaml, line \d.*'[abk]' is given twice"):
        load_yaml(text, "my.yaml")


def test_merge_keys_of_yaml_may_be_overridden():
    assert load_yaml("base: &b {x: 1, y: 2}\nmore: {<<: *b, y: 3}")["more"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("text", ["a: [1, 2", "a: b: c", "!!python/object:os.system {}"])
def test_bad_yaml_is_one_sentence(text):
    with pytest.raises(UserError, match=r"^my\.yaml.* is not valid YAML: [^\n]*\.$"):
        load_yaml(text, "my.yaml")


def test_overrides_nest_and_are_read_like_the_file():
    assert parse_overrides(["optim.lr=1e-4", "optim.betas=[0.8, 0.9]", "name=no", "neg="]) == {
        "optim": {"lr": 1e-4, "betas": [0.8, 0.9]},
        "name": "no",
        "neg": "",
    }


@pytest.mark.parametrize("override", ["optim.lr", "=3", "a..b=1", ".a=1"])
def test_an_override_without_key_or_value_is_an_error(override):
    with pytest.raises(UserError, match="expected KEY=VALUE"):
        parse_overrides([override])


def test_the_last_override_wins():
    assert parse_overrides(["a.b=1", "a.b=2"]) == {"a": {"b": 2}}
    assert parse_overrides(["a=1", "a.b=2"]) == {"a": {"b": 2}}
    assert parse_overrides(["a={b: 1, c: 1}", "a.b=2"]) == {"a": {"b": 2, "c": 1}}


def test_mappings_merge_and_lists_are_replaced():
    assert merge({"a": {"x": 1, "y": 2}, "l": [1, 2]}, {"a": {"y": 3}, "l": [4]}) == {
        "a": {"x": 1, "y": 3},
        "l": [4],
    }


def test_a_mapping_whose_kind_changes_is_replaced_whole():
    base = {"window": {"kind": "progressive", "size": 4, "period": 25}}
    over = parse_overrides(["window.size=2", "window.kind=random"])
    assert merge(base, over) == {"window": {"kind": "random", "size": 2}}


def test_a_mapping_of_the_same_kind_merges():
    base = {"window": {"kind": "random", "size": 4}}
    assert merge(base, {"window": {"kind": "random", "stop": 5}})["window"]["size"] == 4


def test_an_item_of_a_list_can_be_changed_alone():
    base = {"rewards": [{"name": "ocr", "weight": 1}, {"name": "geneval"}]}
    over = parse_overrides(["rewards.0.weight=0.5"])
    assert merge(base, over)["rewards"] == [{"name": "ocr", "weight": 0.5}, {"name": "geneval"}]
    with pytest.raises(UserError, match="There is no item 2: the list has 2"):
        merge(base, parse_overrides(["rewards.2.weight=0.5"]))


def test_a_child_wins_over_its_parent_which_lies_beside_it(tmp_path):
    (tmp_path / "parent.yaml").write_text("a: 1\nb: {c: 2, d: 3}")
    child = tmp_path / "child.yaml"
    child.write_text("extends: parent.yaml\nb: {d: 4}")
    assert load_recipe(child, ["a=5"]) == {"a": 5, "b": {"c": 2, "d": 4}}


def test_a_recipe_may_extend_a_preset(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\nrun: {seed: 7}")
    recipe = load_recipe(path)
    assert recipe["run"]["seed"] == 7
    assert recipe["pipeline"] == load_recipe("quickstart")["pipeline"]


def test_circular_parents_are_an_error(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    with pytest.raises(UserError, match=r"a\.yaml extends itself: a\.yaml -> b\.yaml -> a\.yaml"):
        load_recipe(tmp_path / "a.yaml")


def test_two_parents_in_a_row_are_enough(tmp_path):
    (tmp_path / "0.yaml").write_text("x: 0")
    for i in (1, 2, 3):
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i - 1}.yaml")
    assert load_recipe(tmp_path / "2.yaml") == {"x": 0}
    with pytest.raises(UserError, match=r"3\.yaml has more than 2 parents"):
        load_recipe(tmp_path / "3.yaml")


def test_more_than_one_parent_is_an_error(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("extends: [quickstart, other]")
    with pytest.raises(UserError, match="expected one preset or file"):
        load_recipe(path)


@pytest.mark.parametrize("content", ["- a\n- b", "just text", "3"])
def test_a_file_without_keys_is_an_error(tmp_path, content):
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match="expected keys and values"):
        load_recipe(path)


def test_an_empty_file_is_an_empty_recipe(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing yet\n")
    assert load_recipe(tmp_path / "a.yaml", ["a.b=1"]) == {"a": {"b": 1}}


def test_an_unknown_recipe_names_the_nearest_preset():
    with pytest.raises(UserError, match="Did you mean 'quickstart'"):
        find_recipe("quikstart")


def test_a_file_that_is_no_text_is_one_sentence(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="Cannot read the recipe"):
        load_recipe(path)


def test_presets_are_listed_by_name():
    assert "quickstart" in preset_names()
    assert not [name for name in preset_names() if name.startswith("_")]


GALLERY = Path(__file__).parents[1] / "gallery"


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*/config.yaml")), ids=lambda p: p.parent.name)
def test_what_stands_in_the_gallery_can_be_run_again(path):
    from flowrl.config import config_yaml, load_config

    assert config_yaml(load_config(path)) == path.read_text()
    assert path.read_text().strip() in (path.parent / "README.md").read_text()
