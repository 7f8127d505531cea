"""Trees in recipes: what cannot work is refused, and what is recommended instead works."""

import pytest

from flowrl.config import parse_config
from flowrl.config.load import merge, parse_overrides
from flowrl.errors import UserError

SMALLEST = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}
FAST = "rollout.tree={kind: flow_grpo_fast, window: %s}"
TREE = "rollout.tree={kind: branch_grpo, %s}"


def parse(overrides):
    return parse_config(merge(SMALLEST, parse_overrides(overrides)))


@pytest.mark.parametrize(
    ("overrides", "sentence", "mended"),
    [
        ([FAST % "{kind: random, size: 9}"], "window.size is 9.* is 7", "size=7"),
        ([FAST % "{kind: fixed, size: 4, start: 5}"], "window.size is 4.* is 2", "size=2"),
        ([FAST % "{kind: fixed, size: 2, start: 7}"], "window.start is 7.* is 5", "start=5"),
        ([FAST % "{kind: random, size: 2, stop: 8}"], "window.stop is 8.* is 7", "stop=7"),
        ([FAST % "{kind: progressive, size: 4, stop: 3}"], "window.size is 4.* is 3", "size=3"),
    ],
)
def test_an_impossible_window_is_refused_and_the_suggestion_works(overrides, sentence, mended):
    with pytest.raises(UserError, match=sentence):
        parse(overrides)
    parse([*overrides, f"rollout.tree.window.{mended}"])


def test_a_window_may_reach_but_not_cover_the_last_step():
    assert parse([FAST % "{kind: fixed, size: 7}"]).rollout.tree.window.size == 7
    with pytest.raises(UserError, match="rollout.tree.window.size is 8"):
        parse([FAST % "{kind: fixed, size: 8}"])


@pytest.mark.parametrize(
    ("overrides", "sentence", "mended"),
    [
        (
            [TREE % "splits: [12, 9]"],
            "splits has step 12, .*nearest that work are 5, 6",
            "rollout.tree.splits=[5, 6]",
        ),
        (
            [TREE % "splits: [0, 1]", "rollout.group_size=10"],
            "is 10.* 8 and 12",
            "rollout.group_size=8",
        ),
        ([TREE % "splits: [0]", "rollout.steps=1"], "rollout.steps is 1", "rollout.steps=2"),
        (
            [TREE % "splits: [0, 1]", "rollout.depth_pruning={start: 0, size: 7, stop: 0}"],
            "in iteration 0 rollout.depth_pruning leaves no step to learn from",
            "rollout.depth_pruning.size=6",
        ),
        (
            [TREE % "splits: [0, 1]", "rollout.depth_pruning={start: 2, size: 9}"],
            "depth_pruning.size is 9.*nearest that works is 5",
            "rollout.depth_pruning.size=5",
        ),
        (
            [FAST % "{kind: fixed, size: 2}", "rollout.depth_pruning={start: 2, size: 1, stop: 2}"],
            "depth_pruning covers no step that rollout.tree trains",
            "rollout.depth_pruning={start: 1, size: 1, stop: 1}",
        ),
        (
            [TREE % "splits: [0, 1]", "rollout.depth_pruning={start: 9, size: 1}"],
            "depth_pruning.start is 9.*nearest that works is 6",
            "rollout.depth_pruning.start=6",
        ),
        (
            [TREE % "splits: [0, 1]", "rollout.depth_pruning={start: 2, size: 1, stop: 7}"],
            "depth_pruning.stop is 7.*nearest that works is 6",
            "rollout.depth_pruning.stop=6",
        ),
        (
            [
                "rollout.tree={kind: dynamic_tree, gain_growth: 1.0}",
                "rollout.group_size=16",
                "rollout.kernel=cps",
                "rollout.noise_level=0.8",
            ],
            "1.75 times.*is 0.57",
            "rollout.noise_level=0.57",
        ),
        (
            [
                "rollout.tree={kind: dynamic_tree, gain_growth: 1.0}",
                "rollout.group_size=16",
                "rollout.kernel=renoise",
                "rollout.noise_level=1",
            ],
            "renoise always replaces all.*is 0",
            "rollout.tree.gain_growth=0",
        ),
    ],
)
def test_an_impossible_tree_is_refused_and_the_suggestion_works(overrides, sentence, mended):
    with pytest.raises(UserError, match=sentence):
        parse(overrides)
    parse([*overrides, mended])


@pytest.mark.parametrize(
    ("tree", "credit", "name", "mended"),
    [
        ("flow_grpo", "scope=leaf", "scope", "scope=prompt"),
        ("flow_grpo", "scope=depth", "scope", "scope=prompt"),
        ("mix_grpo, shared_prefix: false", "edges=sibling", "edges", "edges=node"),
        ("flow_grpo", "keep.kind=parent_top1", "keep", "keep.kind=extreme"),
        ("branch_grpo, splits: [0, 1]", "edges=sibling scope=depth", "scope", "scope=leaf"),
        ("branch_grpo, splits: [0, 1]", "edges=sibling scope=sibling", "scope", "scope=joint"),
    ],
)
def test_a_comparison_that_could_teach_nothing_or_the_opposite_is_refused(
    tree, credit, name, mended
):
    wanted = [f"objective.credit.{option}" for option in credit.split()]
    with pytest.raises(UserError, match=f"objective.credit.{name} "):
        parse([f"rollout.tree={{kind: {tree}}}", *wanted])
    parse([f"rollout.tree={{kind: {tree}}}", *wanted, f"objective.credit.{mended}"])


def test_every_iteration_is_looked_at_before_the_first():
    """A drawn window of one step, two steps pruned: some iteration would have nothing to learn."""
    tree = "rollout.tree={kind: tree_grpo, branch: 2, window: {kind: random, size: 1}}"
    pruned = "rollout.depth_pruning={start: 1, size: 2, stop: 1}"
    for seed in range(3):
        with pytest.raises(UserError, match=r"in iteration \d+ rollout.depth_pruning leaves no"):
            parse([tree, pruned, f"run.seed={seed}"])


def test_pruning_that_moves_later_ends_with_the_last_step_that_has_noise():
    config = parse(
        [TREE % "splits: [0, 1]", "rollout.depth_pruning={start: 2, size: 3, period: 1}"]
    )
    pruned = [
        [
            i
            for i, step in enumerate(config.rollout.plan(n, 0).steps)
            if step.noise and not step.train
        ]
        for n in range(5)
    ]
    assert pruned == [[2, 3, 4], [3, 4, 5], [4, 5, 6], [4, 5, 6], [4, 5, 6]]


def test_plans_of_peoples_own_that_fail_are_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "failing_plans.py").write_text(
        "from flowrl.trees.presets import flow_grpo\n"
        "def late(iteration, steps, leaves, seed):\n"
        "    return flow_grpo(steps, leaves) if iteration < 3 else {}['no']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = "rollout.tree={kind: custom, function: 'failing_plans:late'}"
    with pytest.raises(UserError, match="failed in iteration 3: KeyError: 'no'"):
        parse([custom, "run.iterations=5"])
    assert len(parse([custom, "run.iterations=3"]).plans()) == 1


def test_a_plan_that_trains_nothing_is_not_blamed_on_pruning(tmp_path, monkeypatch):
    (tmp_path / "idle_plans.py").write_text(
        "from flowrl.trees.plan import Step, TreePlan\n"
        "def idle(iteration, steps, leaves, seed):\n"
        "    return TreePlan(leaves, (Step(),) * steps)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="rollout.tree trains no step"):
        parse(["rollout.tree={kind: custom, function: 'idle_plans:idle'}"])


def test_fans_are_compared_with_fans():
    fan = ["rollout.tree={kind: tempflow, at: [0, 1]}", "objective.credit.edges=fan"]
    with pytest.raises(UserError, match="objective.credit.scope is depth"):
        parse([*fan, "objective.credit.scope=depth"])
    assert parse([*fan, "objective.credit.scope=leaf"]).objective.credit.scope == "leaf"
