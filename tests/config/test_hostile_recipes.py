"""What a recipe can hold that no recipe should: one sentence says so, in little time."""

import pytest

from flowrl.config import Config, config_yaml, load_config, parse_config
from flowrl.config.load import (
    MAX_TEXT,
    dump_yaml,
    find_recipe,
    load_yaml,
    parse_overrides,
)
from flowrl.config.rollout import RolloutOptions
from flowrl.errors import UserError

BASE = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}


def parse(*overrides, **sections):
    return load_config("quickstart-grpo", [*overrides, *(f"{k}={v}" for k, v in sections.items())])


def refused(*overrides):
    with pytest.raises(UserError) as caught:
        parse(*overrides)
    told = str(caught.value)
    assert "\n" not in told and len(told) < 500 and told.isprintable(), told
    return told


@pytest.fixture
def plans_made(monkeypatch):
    """The iterations whose plan was asked for."""
    made = []
    plan = RolloutOptions.plan
    monkeypatch.setattr(
        RolloutOptions, "plan", lambda self, i, seed: made.append(i) or plan(self, i, seed)
    )
    return made


def test_a_billion_iterations_are_not_walked(plans_made):
    for tree in ("{kind: flow_grpo}", "{kind: flow_grpo_fast, window: {kind: random, size: 2}}"):
        config = parse("run.iterations=1000000000", f"rollout.tree={tree}")
        assert config.run.iterations == 10**9 and len(plans_made) < 25_000
        plans_made.clear()


def test_what_a_long_run_comes_to_late_is_looked_at(plans_made):
    window = "rollout.tree={kind: flow_grpo_fast, window: {kind: progressive, size: 2, period: %d}}"
    short = parse("rollout.num_inference_steps=6", window % 7, "run.iterations=60").plans()
    long = parse(
        "rollout.num_inference_steps=6", window % 7_000_000, "run.iterations=60000000"
    ).plans()
    assert {plan: first * 1_000_000 for plan, first in short.items()} == long and len(long) == 4
    # Depth pruning reaches the only trained step at iteration 300,000.
    fixed = "rollout.tree={kind: flow_grpo_fast, window: {kind: fixed, size: 1, start: 3}}"
    pruning = "rollout.depth_pruning={start: 0, size: 1, period: 100000, stop: 3}"
    assert "in iteration 300000 rollout.depth_pruning leaves no step" in refused(
        fixed, pruning, "run.iterations=1000000"
    )
    growing = "rollout.tree={kind: b2_diffurl, branch: 4, first: 0.4, last: 1, period: %d}"
    growing = [growing % 1000, growing % 1_000_000]
    five = "rollout.num_inference_steps=5"
    short = parse(five, growing[0], "run.iterations=2000").plans()
    long = parse(five, growing[1], "run.iterations=2000000").plans()
    assert list(long) == list(short) and len(long) == 4
    assert len(plans_made) < 100_000


def test_work_and_prompts_of_a_billion_iterations_are_counted_in_little_time():
    from flowrl.assembly.text import prompts_to_encode
    from flowrl.planning.plan import count_work
    from flowrl.prompts.records import load_prompts

    short, long = (parse(f"run.iterations={n}") for n in (100, 10**9))
    assert count_work(long).total.sampling == count_work(short).total.sampling * 10**7
    prompts = load_prompts("tiny:geneval:train")
    assert len(prompts_to_encode(long, prompts, ())) == len(prompts)


ALIASES = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "\n".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]" for i in range(9)
)
MERGES = "a: &a {x0: 1, x1: 1, x2: 1, x3: 1}\n" + "\n".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{', '.join([f'*{chr(97 + i)}'] * 9)}]}}"
    for i in range(9)
)


def test_yaml_that_explodes_nests_or_names_objects_is_refused(tmp_path):
    for text, words in (
        (ALIASES, "more than 20,000 values"),
        (MERGES, "`<<` merges more than 20,000 keys"),
        ("a: &a [*a]", "nested more than 40 deep"),
        ("a: &a {<<: *a}", "nested more than 40 deep"),
        ("[" * 1000 + "]" * 1000, "nested more than 40 deep"),
        ("{a: " * 100 + "1" + "}" * 100, "nested more than 40 deep"),
        ("x" * (MAX_TEXT + 1), "100,001 characters, expected at most 100,000"),
        ("? [a]\n: 1", "line 1 is not valid YAML: the key of a mapping is no text"),
        ("? {a: 1}\n: 1", "the key of a mapping is no text"),
        ("1: a", "the key '1' is no text: write it in quotes"),
        ("null: a", "the key 'null' is no text"),
        ("a: 1\na: 2", "line 2 is not valid YAML: the key 'a' is given twice"),
        ("a: !!python/object/apply:os.getcwd []", "the tag .* is not understood"),
        ("a: !!set {x, y}", "the tag .*set' is not understood"),
        ("a: !!timestamp 2026-01-01", "the tag .* is not understood"),
        ("a: !!binary aGk=", "the tag .* is not understood"),
        ("a: !!bool perhaps", "a value does not suit its tag"),
        ("a: !!int x", "not valid YAML: invalid literal"),
        ("a: " + "7" * 41, "a number of 41 digits, expected at most 40"),
        ("a: 0x" + "f" * 5000, "a number of 5,002 digits"),
        ("a: \x00", "unacceptable character"),
        ("*" + "a" * 5000, "not valid YAML: found undefined alias .*\\.\\.\\."),
    ):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        with pytest.raises(UserError, match=rf"mine\.yaml.*{words}") as caught:
            load_config(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300, text[:40]


def test_aliases_and_merges_of_usual_size_still_work():
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\nd: {<<: [*a, {z: 1}]}"
    found = load_yaml(text)
    assert found["b"] == {"x": 1, "y": 3} and found["c"] == [found["a"]] * 2
    assert found["d"] == {"x": 1, "y": 2, "z": 1}


def test_values_that_mean_something_else_are_refused():
    for override, words in (
        ("optim.betas=[0.9, 1.5]", "optim.betas.1 is 1.5: expected a number less than 1"),
        ("optim.betas=[1, 0.9]", "optim.betas.0 is 1: expected a number less than 1"),
        ("objective.credit.ddof=true", "objective.credit.ddof: expected a number, got true"),
        ("objective.credit.ddof=1.0", "objective.credit.ddof: expected a whole number"),
        ("memory.base_bits=8.0", "memory.base_bits: expected a whole number"),
        ("lora.targets=[]", "lora.targets is []: expected a list of at least 1; null is the "),
        ("rollout.num_inference_steps=1001", "less than or equal to 1000"),
        ("rollout.group_size=1000000000000", "less than or equal to 1000000"),
        ("run.seed=18446744073709551616", "run.seed: expected at most 9,223,372,036,854,775,808"),
        ("run.output_dir=" + "a" * 256, "run.output_dir: expected names of at most 255 bytes"),
        ("run.output_dir=" + "a/" * 2500, "run.output_dir: expected a text of at most 4,000 bytes"),
        ('run.output_dir="a\\0b"', "run.output_dir: expected a text without NUL"),
        ('rollout.negative_prompt="\\ud800"', "negative_prompt: the text holds '\\ud800', half"),
        ("run.output_dir=2026", "run.output_dir is 2026: expected text: put it in quotes"),
        ("run.hub_model_id=#3", "run.hub_model_id is '#3', where YAML takes # for the beginning"),
        ("rollout.explore={keep_layers: ['(']}", "keep_layers.0: expected a regular expression"),
        ("rewards[0].weight=2", "Unknown option rewards[0].weight: write items of lists as "
                                "rewards.0.weight."),
        ("rewards.4.weight=2", "There is no item 4 of rewards: it has 4 items, counted from 0."),
        ("rewards.-1.weight=2", "There is no item -1 of rewards"),
        ("rewards." + "9" * 5000 + ".weight=2", "There is no item '999"),
        ("a" * 5000 + "=1", "Unknown option 'aaa"),
        ("optim" + ".lr" * 3000 + "=1", "nested more than 40 deep"),
        ("rollout.tree={kind: tempflow, width: 2}", "fans at 999 of 1000 steps make"),
        ("rollout.tree={kind: branch_grpo, branch: 1000, splits: [0, 1, 2, 3, 4, 5, 6]}",
         "trees of 1000^7 leaves"),
    ):  # fmt: skip
        steps = ["rollout.num_inference_steps=1000"] if "kind:" in override else []
        assert words in refused(override, *steps)


def test_an_option_of_another_kind_is_named_as_such():
    told = refused("objective.noising.count=2")
    assert "Option objective.noising belongs to objective.kind nft, dpo, gdro" in told
    assert "but here objective.kind is grpo: leave it out, or set objective.kind as well" in told
    told = refused("rollout.tree.window.period=3")
    assert "belongs to rollout.tree.window.kind progressive, but here" in told and "fixed" in told


def test_the_refusal_says_how_to_switch_an_option_off():
    for override, words in (
        ("ema.decay=0", "null is off."),
        ("run.max_minutes=0", "null is no limit."),
        ("rollout.explore=0", "null samples no more than are learned from."),
        ("evaluation.every=null", "0 is only at the start and the end."),
        ("memory.base_bits=0", "null keeps them in pipeline.dtype."),
        ("failures.max_streak=0", "null is never."),
        ("objective.kl_coef=null", "0 is none."),
    ):
        assert refused(override).endswith(words), override


def test_many_mistakes_are_cut_and_long_values_shortened():
    with pytest.raises(UserError) as caught:
        parse_config(BASE | {f"x{i}": 1 for i in range(3000)})
    *first, last = str(caught.value).splitlines()
    assert len(first) == 8 and last == "2992 other options are wrong, too."
    with pytest.raises(UserError, match="There is no recipe 'aaa.*\\.\\.\\.: expected a YAML file"):
        find_recipe("a" * 10_000)
    with pytest.raises(UserError, match="Cannot read 'aaa.*\\.\\.\\.: expected KEY=VALUE"):
        parse_overrides(["a" * 10_000])


def test_data_from_python_is_checked_alike():
    endless: dict = {}
    endless["optim"] = endless
    for data, words in (
        (endless, "nested more than 40 deep"),
        ({"optim": {1: 2}}, "keys that are text"),
        ({"optim": {"lr": 10**400}}, "optim.lr is .*expected a number"),
        ({"run": {"seed": 10**5000}}, "run.seed: expected at most"),
        ({"rewards": [{"name": "a:b"}] * 101}, "rewards is .*expected a list of at most 100"),
        ({"rewards": [{"name": "a:b", "args": {"x": "\ud800"}}]}, "half of a surrogate pair"),
    ):
        with pytest.raises(UserError, match=words):
            parse_config(BASE | data)


def test_every_accepted_text_can_be_written_and_read_again():
    odd = "\x00\x85\u2028\ufeff \U0001f600"
    config = parse_config(
        BASE | {"rollout": {"negative_prompt": odd}, "rewards": [{"name": "o", "args": {"a": odd}}]}
    )
    assert parse_config(load_yaml(config_yaml(config))) == config
    assert load_yaml(dump_yaml({odd: odd})) == {odd: odd}
    assert isinstance(config, Config)
