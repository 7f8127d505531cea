"""Rules between sections: what cannot work together is refused, and the suggestion works."""

import pytest

from flowrl.config import parse_config
from flowrl.config.load import merge, parse_overrides
from flowrl.config.rollout import RolloutOptions
from flowrl.errors import UserError

SMALLEST = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}
FAST = "rollout.tree={kind: flow_grpo_fast, window: %s}"
STEPS = "rollout.num_inference_steps"
TREE = "rollout.tree={kind: branch_grpo, %s}"


PRUNED = "rollout.depth_pruning={%s}"


def parse(*overrides):
    return parse_config(merge(SMALLEST, parse_overrides(overrides)))


def test_an_impossible_tree_or_window_is_refused_and_the_suggestion_works():
    window, pruning = "rollout.tree.window.", "rollout.depth_pruning."
    split = TREE % "splits: [0, 1]"
    for overrides, sentence, mended in (
        ([FAST % "{kind: random, size: 9}"], "window.size is 9.* is 7", f"{window}size=7"),
        ([FAST % "{kind: fixed, size: 8}"], "window.size is 8.* is 7", f"{window}size=7"),
        ([FAST % "{kind: fixed, size: 4, start: 5}"], "size is 4.* is 2", f"{window}size=2"),
        ([FAST % "{kind: fixed, size: 2, start: 7}"], "start is 7.* is 5", f"{window}start=5"),
        ([FAST % "{kind: random, size: 2, stop: 8}"], "stop is 8.* is 7", f"{window}stop=7"),
        ([FAST % "{kind: progressive, size: 4, stop: 3}"], "size is 4.* is 3", f"{window}size=3"),
        ([TREE % "splits: [12, 9]"], "splits has step 12, .* 0 to 6", "rollout.tree.splits=[5, 6]"),
        ([split, "rollout.group_size=10"], "is 10.* 8 and 12", "rollout.group_size=8"),
        ([TREE % "splits: [0]", f"{STEPS}=1"], f"{STEPS} is 1", f"{STEPS}=2"),
        ([split, PRUNED % "start: 0, size: 7, stop: 0"],
         "in iteration 0 rollout.depth_pruning leaves no step", f"{pruning}size=6"),
        ([split, PRUNED % "start: 2, size: 9"], "size is 9.* is 5", f"{pruning}size=5"),
        ([FAST % "{kind: fixed, size: 2}", PRUNED % "start: 2, size: 1, stop: 2"],
         "depth_pruning covers no step", PRUNED % "start: 1, size: 1, stop: 1"),
        ([split, PRUNED % "start: 9, size: 1"], "start is 9.* is 6", f"{pruning}start=6"),
        ([split, PRUNED % "start: 2, size: 1, stop: 7"], "stop is 7.* is 6", f"{pruning}stop=6"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            parse(*overrides)
        parse(*overrides, mended)


def test_a_comparison_that_could_teach_nothing_or_the_opposite_is_refused():
    for tree, credit, name, mended in (
        ("flow_grpo", "scope=leaf", "scope", "scope=prompt"),
        ("flow_grpo", "scope=depth", "scope", "scope=prompt"),
        ("flow_grpo", "edges=sibling", "edges", "edges=node"),
        ("flow_grpo", "keep=parent_top1", "keep", "keep=extreme"),
        ("branch_grpo, splits: [0, 1]", "edges=sibling scope=depth", "scope", "scope=leaf"),
        ("branch_grpo, splits: [0, 1]", "edges=sibling scope=sibling", "scope", "scope=joint"),
        ("tempflow, splits: [0, 1]", "edges=fan scope=depth", "scope", "scope=leaf"),
    ):
        wanted = [f"objective.advantage.{option}" for option in credit.split()]
        with pytest.raises(UserError, match=f"objective.advantage.{name} "):
            parse(f"rollout.tree={{kind: {tree}}}", *wanted)
        parse(f"rollout.tree={{kind: {tree}}}", *wanted, f"objective.advantage.{mended}")


def test_every_iteration_is_looked_at_before_the_first():
    tree = "rollout.tree={kind: tree_grpo, branch: 2, window: {kind: random, size: 1}}"
    pruned = PRUNED % "start: 1, size: 2, stop: 1"
    for seed in range(3):
        with pytest.raises(UserError, match=r"in iteration \d+ rollout.depth_pruning leaves no"):
            parse(tree, pruned, f"run.seed={seed}")


def test_pruning_that_moves_later_ends_with_the_last_step_that_has_noise():
    rollout = parse(TREE % "splits: [0, 1]", PRUNED % "start: 2, size: 3, period: 1").rollout
    plans = [rollout.plan(n, 0).steps for n in range(5)]
    pruned = [[i for i, s in enumerate(steps) if s.noise and not s.train] for steps in plans]
    assert pruned == [[2, 3, 4], [3, 4, 5], [4, 5, 6], [4, 5, 6], [4, 5, 6]]


def test_plans_of_peoples_own_that_fail_or_train_nothing_are_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "failing_plans.py").write_text(
        "from flowrl.trees.plan import Step, TreePlan\n"
        "from flowrl.trees.presets import chains\n"
        "def late(iteration, steps, leaves, seed):\n"
        "    return chains(steps, leaves, range(steps - 1)) if iteration < 3 else {}['no']\n"
        "def idle(iteration, steps, leaves, seed):\n"
        "    return TreePlan(leaves, (Step(),) * steps)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = "rollout.tree={kind: custom, function: 'failing_plans:%s'}"
    with pytest.raises(UserError, match="failed in iteration 3: KeyError: 'no'"):
        parse(custom % "late", "run.iterations=5")
    assert len(parse(custom % "late", "run.iterations=3").plans()) == 1
    with pytest.raises(UserError, match="rollout.tree trains no step"):  # not blamed on pruning
        parse(custom % "idle")


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["optim.updates_per_rollout=3"], "optim.updates_per_rollout", "2"),
        (["rollout.group_size=1"], "rollout.group_size", "2"),
        (["rollout.kernel=cps", "rollout.noise_level=1.5"], "rollout.noise_level", "1"),
        (["rollout.kernel=cps", "rollout.noise_level=1", "objective.kl_form=latent_no_dt"],
         "objective.kl_form", "latent_dt"),
        (["run.stop_when_hacking={held_out: quality}"], "evaluation.every", "10"),
        (["runtime.shard=node", "rollout.merge_lora=true"], "rollout.merge_lora", "auto"),
        (["runtime.shard=node", "pipeline.compile=true"], "pipeline.compile", "false"),
        (["runtime.shard=node", "rollout.explore={candidates: 20}"],
         "rollout.explore.precision", "bf16"),
        (["runtime.shard=node", "pipeline.precision=fp8"], "pipeline.precision", "null"),
        (["runtime.shard=node", "memory.base_bits=8"], "memory.base_bits", "null"),
        (["prompts.weights={colors: 3}"], "prompts.balance", "tag"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other_are_refused_by_name(overrides, key, value):
    with pytest.raises(UserError, match=key) as caught:
        parse(*overrides)
    assert "\n" not in str(caught.value)
    parse(*overrides, f"{key}={value}")


@pytest.fixture
def plans_made(monkeypatch):
    """The iterations whose plan was computed."""
    made = []
    plan = RolloutOptions.plan
    monkeypatch.setattr(
        RolloutOptions, "plan", lambda self, i, seed: made.append(i) or plan(self, i, seed)
    )
    return made


def test_a_billion_iterations_are_not_walked(plans_made):
    for tree in ("{kind: flow_grpo}", "{kind: flow_grpo_fast, window: {kind: random, size: 2}}"):
        config = parse("run.iterations=1000000000", f"rollout.tree={tree}")
        assert config.plans() and len(plans_made) < 50_000
        plans_made.clear()
