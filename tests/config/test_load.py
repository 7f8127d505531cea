"""Recipes with parents and overrides."""

from pathlib import Path

import pytest

from flowrl.config import config_yaml, load_config, parse_config
from flowrl.config.load import (
    load_recipe,
    merge,
    parse_overrides,
    preset_folder,
    preset_names,
)
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError

GALLERY = Path(__file__).parents[2] / "gallery"


def test_overrides_are_nested_and_their_values_are_yaml():
    assert parse_overrides(["a.b=1e-4", "a.c=[1, x]", "d=", "e={f: null}"]) == {
        "a": {"b": 1e-4, "c": [1, "x"]},
        "d": "",
        "e": {"f": None},
    }
    for override in ["optim.lr", "=3", "a..b=1", ".a=1", "a=[1, 2", "a=b # c", "x" * 10_000]:
        with pytest.raises(UserError) as caught:
            parse_overrides([override])
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_mappings_merge_lists_are_replaced_and_another_kind_replaces_all():
    base = {"a": {"x": 1, "y": 2}, "l": [{"n": 1}, {"n": 2}], "t": {"kind": "p", "q": 1}}
    assert merge(base, {"a": {"y": 3}})["a"] == {"x": 1, "y": 3}
    assert merge(base, {"l": [3]})["l"] == [3]
    assert merge(base, {"l": {"1": {"n": 5}}})["l"] == [{"n": 1}, {"n": 5}]
    assert merge(base, {"t": {"kind": "r", "s": 1}})["t"] == {"kind": "r", "s": 1}
    assert merge(base, {"t": {"kind": "p", "s": 1}})["t"] == {"kind": "p", "q": 1, "s": 1}
    for number in ("2", "-1", "x", "9" * 5000):
        with pytest.raises(UserError, match="item .* of l"):
            merge(base, {"l": {number: {"n": 1}}})


def test_a_recipe_extends_a_preset_or_a_file_beside_it(tmp_path):
    (tmp_path / "parent.yaml").write_text("a: 1\nb: {c: 2, d: 3}")
    child = tmp_path / "child.yaml"
    child.write_text("extends: parent.yaml\nb: {d: 4}")
    assert load_recipe(child, ["a=5"]) == {"a": 5, "b": {"c": 2, "d": 4}}
    child.write_text("extends: quickstart\nrun: {seed: 7}")
    recipe = load_recipe(child)
    assert recipe["run"]["seed"] == 7
    assert recipe["pipeline"] == load_recipe("quickstart")["pipeline"]
    child.write_text("# nothing yet\n")
    assert load_recipe(child, ["a.b=1", "a=null", "a.c=2"]) == {"a": {"c": 2}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"extends: [quickstart, other]", r"mine\.yaml"),
        (b"extends: quikstart", r"mine\.yaml.*'quickstart'"),
        (b"extends: mine.yaml", r"mine\.yaml -> mine\.yaml"),
        (b"- a\n- b", r"mine\.yaml"),
        (b"3", r"mine\.yaml"),
        (b"\xff\xfe", r"mine\.yaml"),
    ],
)
def test_files_that_are_no_recipe_are_refused_by_name(content, words, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_recipe(path)


def test_presets_and_gallery_entries_are_valid_and_read_back(tmp_path):
    assert "quickstart" in preset_names()
    paths = [preset_folder() / f"{name}.yaml" for name in preset_names()]
    for path in [*paths, *sorted(GALLERY.glob("*/config.yaml"))]:
        config = load_config(path)
        assert parse_config(load_yaml(config_yaml(config))) == config, path
    for path in preset_folder().rglob("*.yaml"):
        assert path.read_text("utf-8").startswith("# "), path  # what it is for
