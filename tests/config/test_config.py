"""Recipes: what is read, what is refused, and what is recommended instead works."""

import ast
import inspect
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.config import Config, config_yaml, load_config, parse_config
from flowrl.config.explain import explain
from flowrl.config.load import (
    ALIASES,
    load_yaml,
    merge,
    parse_overrides,
    preset_folder,
    preset_names,
    sort_arguments,
)
from flowrl.config.messages import sections_in, walk
from flowrl.config.rollout import AuditOptions
from flowrl.config.trees import PRESETS
from flowrl.errors import UserError
from flowrl.trees.plan import NoiseCoupling
from flowrl.utils.fields import Options

SMALLEST = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}


def parse(text="", overrides=()):
    data = merge(SMALLEST, load_yaml(text) or {})
    return parse_config(merge(data, parse_overrides(overrides)))


FAST = "rollout.tree={kind: flow_grpo_fast, window: %s}"


def test_every_preset_is_valid_and_reads_back_from_its_resolved_form(tmp_path):
    for name in preset_names():
        config = load_config(name)
        saved = tmp_path / "config.yaml"
        saved.write_text(config_yaml(config))
        assert load_config(saved) == config, name
    for path in preset_folder().rglob("*.yaml"):
        assert path.read_text().startswith("# "), path  # what it is for


def test_a_learning_rate_is_a_float_however_it_is_written():
    for text in ["1e-4", "1E-4", "1.0e-4", "0.0001"]:
        from_file = parse(f"optim: {{lr: {text}}}")
        from_flag = parse("", [f"optim.lr={text}"])
        assert type(from_file.optim.lr) is type(from_flag.optim.lr) is float
        assert from_file.optim.lr == from_flag.optim.lr == 1e-4
    text = "{prompts: {train: a.txt}, rewards: [{name: ocr}], optim: {lr: 1e-4}}"
    assert isinstance(yaml.safe_load(text)["optim"]["lr"], str)  # plain YAML's
    assert parse_config(yaml.safe_load(text)).optim.lr == 1e-4


def test_a_wrong_option_is_named_with_what_was_expected():
    for override, *named in (
        ("optim.lrr=1", "optim.lrr", "optim.lr?"),
        ("rollout.lr=1", "rollout.lr:", "optim.lr?"),
        ("optimm.lr=1", "optimm:", "optim?"),
        ("rewards.0.wieght=1", "rewards.0.wieght", "rewards.0.weight?"),
        ("rollout.tree={kind: branch_grpo, split: [0]}", "rollout.tree.split:", "splits?"),
        ("rollout.tree={kind: branch_grp}", "rollout.tree.kind", "'branch_grp'", "branch_grpo?"),
        ("rollout.tree={splits: [0]}", "rollout.tree.kind"),
        (FAST % "{kind: random, sise: 2}", "window.sise", "rollout.tree.window.size?"),
        (FAST % "{kind: randm}", "window.kind", "'randm'", "random?"),
        ("qqqq=1", "qqqq", "pipeline, memory", ", runtime."),
        ("optim.lr=fast", "optim.lr", "'fast'"),
        ("optim.lr=0", "optim.lr", "greater than 0."),
        ("optim.lr=.inf", "optim.lr", "finite"),
        ("optim=3", "optim is 3"),
        ("lora.rank=1e4", "lora.rank", "whole number"),
        ("lora.rank=true", "lora.rank", "true"),
        ("optim.lr=true", "optim.lr", "true"),
        ("pipeline.height=true", "pipeline.height", "true"),
        ("rewards.0.held_out=yes", "rewards.0.held_out", "'yes'"),
        ("rewards.0.held_out=1", "rewards.0.held_out", "true or false"),
        ("rollout.merge_lora=on", "rollout.merge_lora", "'auto' or true or false"),
        ("run.trackers=[tb]", "run.trackers.0", "'tensorboard', 'wandb'"),
        ("prompts.train=", "prompts.train"),
        ("ema.decay=1", "ema.decay", "less than 1."),
        ("rewards=[{weight: 1}]", "rewards.0.name"),
        ("rollout.num_inference_steps=1", "rollout.num_inference_steps", "at least 2"),
        ("objective.clip_eps=1e-5", "clip_eps", "both are set"),
        ("objective.clip_nats=null", "clip_nats", "neither is set"),
        ("rewards=[]", "learn"),
        ("rewards=[{name: ocr, held_out: true}]", "learn"),
        ("rewards=[{name: ocr, weight: 0}]", "learn"),
        ("rewards=[{name: ocr}, {name: ocr, weight: 2}]", "args"),
    ):
        with pytest.raises(UserError) as caught:
            parse("", [override])
        told = str(caught.value)
        assert all(name in told for name in named) and "\n" not in told, (override, told)


def test_several_mistakes_and_missing_options_are_told_at_once():
    with pytest.raises(UserError) as caught:
        parse("", ["optim.lrr=1", "lora.rank=-1"])
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(UserError) as caught:
        parse_config({})
    assert "Option prompts is" in str(caught.value) and "Option rewards is" in str(caught.value)
    with pytest.raises(UserError, match="Unknown option optim.lr: dots join keys on the command"):
        parse("optim.lr: 1e-4")


def test_impossible_numbers_are_refused_and_the_suggestion_works():
    for overrides, key, value in (
        (["optim.updates_per_rollout=3"], "optim.updates_per_rollout", 2),
        (["rollout.group_size=1"], "rollout.group_size", 2),
        (["rollout.kernel=cps", "rollout.noise_level=1.5"], "rollout.noise_level", 1),
    ):
        with pytest.raises(UserError, match=f"{key} is .*nearest valid value is {value}") as got:
            parse("", overrides)
        assert "\n" not in str(got.value)
        parse("", [*overrides, f"{key}={value}"])


def test_options_that_fit_each_other_are_accepted():
    for kernel in ("cps", "renoise"):
        words = [f"rollout.kernel={kernel}", "rollout.noise_level=1"]
        with pytest.raises(UserError, match="kl_form.*use latent_dt"):
            parse("", [*words, "objective.kl_form=latent_no_dt"])
        parse("", [*words, "objective.kl_form=latent_dt"])
    config = parse("", ["objective.clip_eps=1e-5", "objective.clip_nats=null"])
    assert parse_config(load_yaml(config_yaml(config))).objective.clip_eps == 1e-5
    strict = "{name: geneval, args: {mode: strict}, held_out: true}"
    assert len(parse("", [f"rewards=[{{name: geneval}}, {strict}]"]).rewards) == 2
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3  # type: ignore[misc]


@settings(max_examples=15)
@given(
    lr=st.floats(1e-12, 1e3),
    seed=st.integers(0, 2**63),
    negative=st.text(),
    args=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()),
)
def test_the_resolved_configuration_reads_back_equal(lr, seed, negative, args):
    data = {"optim": {"lr": lr}, "run": {"seed": seed}, "rollout": {"negative_prompt": negative}}
    config = parse_config({**SMALLEST, **data, "rewards": [{"name": "a:b", "args": args}]})
    assert parse_config(load_yaml(config_yaml(config))) == config


def test_every_option_is_read():
    """By its name where the run is built, or by `arguments()`, which passes all of a section.

    Counted by name, so that one section's option does not stand for another's. A section that
    several others hold, or inherit from, is one: what reads it reads it for all.
    """
    package = Path(__file__).parents[2] / "flowrl"
    files = [*package.glob("assembly/*.py"), *package.glob("config/*.py"), package / "api.py"]
    files += [package / "trees" / "windows.py", *package.glob("export/*.py")]
    files += [package / "training" / name for name in ("loop.py", "run.py")]
    trees = [ast.parse(path.read_text()) for path in files]
    read = Counter(n.attr for t in trees for n in ast.walk(t) if isinstance(n, ast.Attribute))
    passed = {AuditOptions, NoiseCoupling, *PRESETS.values()}  # by `arguments()` of another object
    passed |= {owner for owner, _ in owned_options(Config) if passes_itself(owner)}
    wanted = Counter(name for owner, name in owned_options(Config) if owner not in passed)
    del wanted["kind"]
    unread = {name: f"{read[name]} of {n}" for name, n in wanted.items() if read[name] < n}
    assert not unread


def passes_itself(section: type) -> bool:
    """Whether the `build` of a section, of its bases or of its heirs calls `arguments()`."""
    own = any(
        "arguments()" in inspect.getsource(method)
        for cls in section.__mro__
        if issubclass(cls, Options) and cls is not Options
        for method in vars(cls).values()
        if inspect.isfunction(method) and method.__module__.startswith("flowrl.config")
    )
    return own or any(passes_itself(heir) for heir in section.__subclasses__())


def owned_options(model: type[Options]) -> set[tuple[type, str]]:
    found = set()
    for name, field in model.model_fields.items():
        inner = sections_in(field.annotation)
        if not inner:
            owner = next(
                c for c in reversed(model.__mro__) if name in c.__dict__.get("__annotations__", {})
            )
            found.add((owner, name))
        found |= {option for section in inner for option in owned_options(section)}
    return found


def test_every_option_has_a_meaning_and_every_alias_leads_to_one():
    options = list(walk(Config))
    for option in options:
        assert option.meaning.strip(), option.path
    paths = {option.path for option in options}
    for alias, path in ALIASES.items():
        assert path in paths, alias
        assert explain(alias if alias not in ("prompts", "reward") else path)


def test_names_from_diffusers_scripts_are_understood():
    for words, path, value in (
        ("--learning_rate 1e-4", "optim.lr", 1e-4),
        ("--learning-rate=1e-4", "optim.lr", 1e-4),
        ("learning_rate=1e-4", "optim.lr", 1e-4),
        ("--optim.lr 1e-4", "optim.lr", 1e-4),
        ("--output_dir runs/x", "run.output_dir", "runs/x"),
        ("--mixed_precision no", "pipeline.dtype", "fp32"),
        ("--mixed_precision bf16", "pipeline.dtype", "bf16"),
        ("--resolution 128", "pipeline.width", 128),
        ("--report_to wandb", "run.trackers", ["wandb"]),
        ("--report_to none", "run.trackers", []),
        ("--prompts mine.txt", "prompts.train", "mine.txt"),
        ("--max_train_steps 7", "run.iterations", 7),
    ):
        request = sort_arguments(["quickstart", *words.split()])
        node = load_config(request.recipe, request.overrides)
        for part in path.split("."):
            node = getattr(node, part)
        assert node == value, words


def test_prompts_of_ones_own_replace_what_the_recipe_says_of_its_own(tmp_path):
    request = sort_arguments(["tiny-sd3-nft-composite", "--prompts", "mine.txt", "--reward", "ocr"])
    config = load_config(request.recipe, request.overrides)
    assert (config.prompts.balance, config.evaluation.prompts, config.prompts.held_out) == (
        None, None, 0.1,
    )  # fmt: skip
    assert config.held_out == "mine.txt"
    assert [reward.name for reward in config.rewards] == ["ocr"]
    words = ["quickstart", "evaluation.prompts=b.txt", "prompts.balance=tag", "--prompts", "a.txt"]
    again = sort_arguments(words)
    config = load_config(again.recipe, again.overrides)
    assert (config.evaluation.prompts, config.prompts.balance) == ("b.txt", "tag")
    weighed = ["quickstart", "prompts.weights={colors: 3}"]
    assert load_config(weighed[0], weighed[1:]).prompts.weights == {"colors": 3}
    recipe = tmp_path / "weighed.yaml"
    recipe.write_text("extends: quickstart\nprompts: {weights: {colors: 3}}")
    own = sort_arguments([str(recipe), "--prompts", "mine.txt"])
    assert load_config(own.recipe, own.overrides).prompts.weights is None
    own = sort_arguments(
        [str(recipe), "--prompts", "mine.txt", "prompts.balance=tag", "prompts.weights={ocr: 3}"]
    )
    assert load_config(own.recipe, own.overrides).prompts.weights == {"ocr": 3}
    with pytest.raises(UserError, match="less than or equal to 1000|up to 1000"):
        load_config(recipe, ["prompts.weights={colors: 1001}"])
    with pytest.raises(UserError, match="prompts.weights is set without prompts.balance"):
        load_config(weighed[0], [*weighed[1:], "prompts.balance=null"])


def test_rewards_can_be_named_on_the_command_line():
    together = sort_arguments(["quickstart", "--reward", "ocr,my.own:Reward"])
    request = sort_arguments(["quickstart", "--reward", "ocr", "--reward=my.own:Reward"])
    assert request == together
    rewards = load_config(request.recipe, request.overrides).rewards
    assert [reward.name for reward in rewards] == ["ocr", "my.own:Reward"]
    with pytest.raises(UserError, match="Got two recipes, 'a' and 'b'"):
        sort_arguments(["a", "b"])
    with pytest.raises(UserError, match="--learning_rate has no value"):
        sort_arguments(["a", "--learning_rate"])
    assert sort_arguments(["--resume_from_checkpoint", "latest", "a"]).resume == "latest"


def trees_of(overrides):
    return parse("", overrides)


STEPS = "rollout.num_inference_steps"
TREE = "rollout.tree={kind: branch_grpo, %s}"


GROWING = "rollout.tree={kind: dynamic_tree, gain_growth: 1.0}"
PRUNED = "rollout.depth_pruning={%s}"


def test_an_impossible_tree_or_window_is_refused_and_the_suggestion_works():
    window, pruning = "rollout.tree.window.", "rollout.depth_pruning."
    split, wide = TREE % "splits: [0, 1]", [GROWING, "rollout.group_size=16"]
    for overrides, sentence, mended in (
        ([FAST % "{kind: random, size: 9}"], "window.size is 9.* is 7", f"{window}size=7"),
        ([FAST % "{kind: fixed, size: 8}"], "window.size is 8.* is 7", f"{window}size=7"),
        ([FAST % "{kind: fixed, size: 4, start: 5}"], "size is 4.* is 2", f"{window}size=2"),
        ([FAST % "{kind: fixed, size: 2, start: 7}"], "start is 7.* is 5", f"{window}start=5"),
        ([FAST % "{kind: random, size: 2, stop: 8}"], "stop is 8.* is 7", f"{window}stop=7"),
        ([FAST % "{kind: progressive, size: 4, stop: 3}"], "size is 4.* is 3", f"{window}size=3"),
        ([TREE % "splits: [12, 9]"], "splits has step 12, .* 5, 6", "rollout.tree.splits=[5, 6]"),
        ([split, "rollout.group_size=10"], "is 10.* 8 and 12", "rollout.group_size=8"),
        ([TREE % "splits: [0]", f"{STEPS}=1"], f"{STEPS} is 1", f"{STEPS}=2"),
        ([split, PRUNED % "start: 0, size: 7, stop: 0"],
         "in iteration 0 rollout.depth_pruning leaves no step", f"{pruning}size=6"),
        ([split, PRUNED % "start: 2, size: 9"], "size is 9.* is 5", f"{pruning}size=5"),
        ([FAST % "{kind: fixed, size: 2}", PRUNED % "start: 2, size: 1, stop: 2"],
         "depth_pruning covers no step", PRUNED % "start: 1, size: 1, stop: 1"),
        ([split, PRUNED % "start: 9, size: 1"], "start is 9.* is 6", f"{pruning}start=6"),
        ([split, PRUNED % "start: 2, size: 1, stop: 7"], "stop is 7.* is 6", f"{pruning}stop=6"),
        ([*wide, "rollout.kernel=cps", "rollout.noise_level=0.8"],
         "1.75 times.*is 0.57", "rollout.noise_level=0.57"),
        ([*wide, "rollout.kernel=renoise", "rollout.noise_level=1"],
         "gain_growth.*is 0", "rollout.tree.gain_growth=0"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            trees_of(overrides)
        trees_of([*overrides, mended])


def test_a_comparison_that_could_teach_nothing_or_the_opposite_is_refused():
    for tree, credit, name, mended in (
        ("flow_grpo", "scope=leaf", "scope", "scope=prompt"),
        ("flow_grpo", "scope=depth", "scope", "scope=prompt"),
        ("mix_grpo, shared_prefix: false", "edges=sibling", "edges", "edges=node"),
        ("flow_grpo", "keep.kind=parent_top1", "keep", "keep.kind=extreme"),
        ("branch_grpo, splits: [0, 1]", "edges=sibling scope=depth", "scope", "scope=leaf"),
        ("branch_grpo, splits: [0, 1]", "edges=sibling scope=sibling", "scope", "scope=joint"),
        ("tempflow, at: [0, 1]", "edges=fan scope=depth", "scope", "scope=leaf"),
    ):
        wanted = [f"objective.credit.{option}" for option in credit.split()]
        with pytest.raises(UserError, match=f"objective.credit.{name} "):
            trees_of([f"rollout.tree={{kind: {tree}}}", *wanted])
        trees_of([f"rollout.tree={{kind: {tree}}}", *wanted, f"objective.credit.{mended}"])


def test_every_iteration_is_looked_at_before_the_first():
    tree = "rollout.tree={kind: tree_grpo, branch: 2, window: {kind: random, size: 1}}"
    pruned = PRUNED % "start: 1, size: 2, stop: 1"
    for seed in range(3):
        with pytest.raises(UserError, match=r"in iteration \d+ rollout.depth_pruning leaves no"):
            trees_of([tree, pruned, f"run.seed={seed}"])


def test_pruning_that_moves_later_ends_with_the_last_step_that_has_noise():
    rollout = trees_of([TREE % "splits: [0, 1]", PRUNED % "start: 2, size: 3, period: 1"]).rollout
    plans = [rollout.plan(n, 0).steps for n in range(5)]
    pruned = [[i for i, s in enumerate(steps) if s.noise and not s.train] for steps in plans]
    assert pruned == [[2, 3, 4], [3, 4, 5], [4, 5, 6], [4, 5, 6], [4, 5, 6]]


def test_plans_of_peoples_own_that_fail_or_train_nothing_are_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "failing_plans.py").write_text(
        "from flowrl.trees.plan import Step, TreePlan\n"
        "from flowrl.trees.presets import flow_grpo\n"
        "def late(iteration, steps, leaves, seed):\n"
        "    return flow_grpo(steps, leaves) if iteration < 3 else {}['no']\n"
        "def idle(iteration, steps, leaves, seed):\n"
        "    return TreePlan(leaves, (Step(),) * steps)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = "rollout.tree={kind: custom, function: 'failing_plans:%s'}"
    with pytest.raises(UserError, match="failed in iteration 3: KeyError: 'no'"):
        trees_of([custom % "late", "run.iterations=5"])
    assert len(trees_of([custom % "late", "run.iterations=3"]).plans()) == 1
    with pytest.raises(UserError, match="rollout.tree trains no step"):  # not blamed on pruning
        trees_of([custom % "idle"])
