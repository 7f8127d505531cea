import ast
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
from flowrl.errors import UserError
from flowrl.utils.fields import Options

SMALLEST = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}


def parse(text="", overrides=()):
    data = merge(SMALLEST, load_yaml(text) or {})
    return parse_config(merge(data, parse_overrides(overrides)))


FAST = "rollout.tree={kind: flow_grpo_fast, window: %s}"
TREE = "rollout.tree={kind: branch_grpo, %s}"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_reads_back_from_its_resolved_form(name, tmp_path):
    config = load_config(name)
    saved = tmp_path / "config.yaml"
    saved.write_text(config_yaml(config))
    assert load_config(saved) == config


@pytest.mark.parametrize("path", sorted(preset_folder().rglob("*.yaml")), ids=lambda p: p.name)
def test_every_config_file_says_what_it_is_for(path):
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001"])
def test_a_learning_rate_is_a_float_however_it_is_written(text):
    from_file = parse(f"optim: {{lr: {text}}}")
    from_flag = parse("", [f"optim.lr={text}"])
    assert type(from_file.optim.lr) is type(from_flag.optim.lr) is float
    assert from_file.optim.lr == from_flag.optim.lr == 1e-4


def test_plain_yaml_with_its_text_floats_still_gives_floats():
    text = "{prompts: {train: a.txt}, rewards: [{name: ocr}], optim: {lr: 1e-4}}"
    assert isinstance(yaml.safe_load(text)["optim"]["lr"], str)
    assert parse_config(yaml.safe_load(text)).optim.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optim.lrr=1", "Unknown option optim.lrr: .*; did you mean optim.lr?"),
        ("rollout.lr=1", "Unknown option rollout.lr: .*; did you mean optim.lr?"),
        ("optimm.lr=1", "Unknown option optimm: .*; did you mean optim?"),
        ("rewards.0.wieght=1", "Unknown option rewards.0.wieght: .* rewards.0.weight?"),
        ("rollout.tree={kind: branch_grpo, split: [0]}", "tree.split: .*did you mean .*splits?"),
        ("rollout.tree={kind: branch_grp}", "tree.kind is 'branch_grp': .*; did you mean branch_g"),
        ("rollout.tree={splits: [0]}", "Option rollout.tree.kind is missing"),
        (FAST % "{kind: random, sise: 2}", "window.sise: .*rollout.tree.window.size?"),
        (FAST % "{kind: randm}", "window.kind is 'randm': .*; did you mean random?"),
        ("qqqq=1", "Unknown option qqqq: the top level has pipeline, memory, .*, run.$"),
        ("optim.lr=fast", "Option optim.lr is 'fast': expected a number.$"),
        ("optim.lr=0", "Option optim.lr is 0: expected a number greater than 0.$"),
        ("optim.lr=.inf", "Option optim.lr is inf: expected a finite number.$"),
        ("optim=3", "Option optim is 3: expected keys and values.$"),
        ("lora.rank=1e4", "Option lora.rank: expected a whole number without point or exponent"),
        ("lora.rank=true", "Option lora.rank: expected a number, got true.$"),
        ("optim.lr=true", "Option optim.lr: expected a number, got true.$"),
        ("pipeline.height=true", "Option pipeline.height: expected a number, got true.$"),
        ("rewards.0.held_out=yes", "Option rewards.0.held_out is 'yes': expected true or false.$"),
        ("rewards.0.held_out=1", "Option rewards.0.held_out is 1: expected true or false.$"),
        ("rollout.merge_lora=on", "merge_lora is 'on': expected 'auto' or true or false.$"),
        ("run.trackers=[tb]", "Option run.trackers.0 is 'tb': expected 'tensorboard', 'wandb' or"),
        ("prompts.train=", "Option prompts.train: expected some text, got none.$"),
        ("ema.decay=1", "Option ema.decay is 1: expected a number less than 1.$"),
        ("rewards=[{weight: 1}]", "Option rewards.0.name is missing: A built-in reward"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(override, sentence):
    with pytest.raises(UserError, match=sentence.replace("?", r"\?")) as caught:
        parse("", [override])
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_told_at_once():
    with pytest.raises(UserError) as caught:
        parse("", ["optim.lrr=1", "lora.rank=-1"])
    assert len(str(caught.value).splitlines()) == 2


def test_dots_in_a_file_are_explained():
    with pytest.raises(UserError, match="Unknown option optim.lr: dots join keys on the command"):
        parse("optim.lr: 1e-4")


def test_what_must_be_given_is_asked_for():
    with pytest.raises(UserError) as caught:
        parse_config({})
    assert "Option prompts is missing" in str(caught.value)
    assert "Option rewards is missing" in str(caught.value)


def test_one_step_cannot_be_trained():
    with pytest.raises(UserError, match="rollout.steps is 1, expected at least 2"):
        parse("", ["rollout.steps=1"])


@pytest.mark.parametrize(
    ("overrides", "mended"),
    [
        (["optim.updates_per_rollout=3"], "optim.updates_per_rollout=2"),
        (["rollout.group_size=1"], "rollout.group_size=2"),
        (["rollout.kernel=cps", "rollout.noise_level=1.5"], "rollout.noise_level=1"),
    ],
)
def test_impossible_numbers_are_refused_and_the_suggestion_works(overrides, mended):
    key, _, value = mended.partition("=")
    with pytest.raises(UserError, match=f"{key} is .*: the nearest valid value is {value}") as got:
        parse("", overrides)
    assert "\n" not in str(got.value)
    parse("", [*overrides, mended])


@pytest.mark.parametrize("kernel", ["cps", "renoise"])
def test_the_form_of_the_pull_fits_the_kernel(kernel):
    words = [f"rollout.kernel={kernel}", "rollout.noise_level=1"]
    with pytest.raises(UserError, match="use latent_dt, the published form for cps"):
        parse("", [*words, "objective.kl_form=latent_no_dt"])
    parse("", [*words, "objective.kl_form=latent_dt"])


def test_the_clip_is_given_in_one_unit():
    with pytest.raises(UserError, match="both are set, expected one"):
        parse("", ["objective.clip_eps=1e-5"])
    with pytest.raises(UserError, match="neither is set, expected one"):
        parse("", ["objective.clip_nats=null"])
    config = parse("", ["objective.clip_eps=1e-5", "objective.clip_nats=null"])
    assert parse_config(load_yaml(config_yaml(config))).objective.clip_eps == 1e-5


def test_something_must_be_learned():
    for rewards in ("[]", "[{name: ocr, held_out: true}]", "[{name: ocr, weight: 0}]"):
        with pytest.raises(UserError, match="nothing to learn from"):
            parse("", [f"rewards={rewards}"])


def test_a_reward_may_be_learned_in_one_mode_and_watched_in_another():
    strict = "{name: geneval, args: {mode: strict}, held_out: true}"
    assert len(parse("", [f"rewards=[{{name: geneval}}, {strict}]"]).rewards) == 2
    with pytest.raises(UserError, match="same args as one before"):
        parse("", ["rewards=[{name: ocr}, {name: ocr, weight: 2}]"])


def test_the_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        parse().run.seed = 3  # type: ignore[misc]


@settings(max_examples=50)
@given(
    lr=st.floats(1e-12, 1e3),
    seed=st.integers(0, 2**63),
    negative=st.text(),
    args=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()),
)
def test_the_resolved_configuration_reads_back_equal(lr, seed, negative, args):
    data = {"optim": {"lr": lr}, "run": {"seed": seed}, "rollout": {"negative": negative}}
    config = parse_config({**SMALLEST, **data, "rewards": [{"name": "a:b", "args": args}]})
    assert parse_config(load_yaml(config_yaml(config))) == config


def test_every_option_has_a_meaning():
    for option in walk(Config):
        assert option.meaning.strip(), option.path


def test_every_option_is_read_where_the_run_is_built():
    """Counted by name, so that `rollout.steps` does not stand for `evaluation.steps`.

    A section that several others hold, or inherit from, is one: what reads it reads it for all.
    """
    package = Path(__file__).parent.parent / "flowrl"
    plans = ("learning", "trees", "forests", "windows")  # these sections make plans themselves
    files = [
        *package.glob("build*.py"),
        *(package / f"{name}.py" for name in ("handover", "actions")),
        *(package / f"sections_{name}.py" for name in plans),
    ]
    trees = [ast.parse(path.read_text()) for path in files]
    read = Counter(n.attr for t in trees for n in ast.walk(t) if isinstance(n, ast.Attribute))
    wanted = Counter(name for _, name in owned_options(Config) if name != "kind")
    unread = {name: f"{read[name]} of {n}" for name, n in wanted.items() if read[name] < n}
    assert not unread


def owned_options(model: type[Options]) -> set[tuple[type, str]]:
    """Every option below `model` that is no section, with the class that declares it."""
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


@pytest.mark.parametrize(("alias", "path"), ALIASES.items())
def test_every_alias_leads_to_an_option(alias, path):
    assert path in {option.path for option in walk(Config)}
    assert explain(alias if alias not in ("prompts", "reward") else path)


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
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
    ],
)
def test_names_from_diffusers_scripts_are_understood(words, path, value):
    request = sort_arguments(["quickstart", *words.split()])
    node = load_config(request.recipe, request.overrides)
    for part in path.split("."):
        node = getattr(node, part)
    assert node == value


def test_rewards_can_be_named_on_the_command_line():
    together = sort_arguments(["quickstart", "--reward", "ocr,my.own:Reward"])
    request = sort_arguments(["quickstart", "--reward", "ocr", "--reward=my.own:Reward"])
    assert request == together
    rewards = load_config(request.recipe, request.overrides).rewards
    assert [reward.name for reward in rewards] == ["ocr", "my.own:Reward"]


def test_arguments_that_make_no_sense_are_explained():
    with pytest.raises(UserError, match="Got two recipes, 'a' and 'b'"):
        sort_arguments(["a", "b"])
    with pytest.raises(UserError, match="--learning_rate has no value"):
        sort_arguments(["a", "--learning_rate"])
    assert sort_arguments(["--resume_from_checkpoint", "latest", "a"]).resume == "latest"
