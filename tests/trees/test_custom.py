import pytest
from any_plan import nearest

from flowrl.trees.plan import PlanError
from flowrl.trees.presets import CustomTreeOptions

SOURCE = """
from flowrl.trees.plan import Step, TreePlan

NUMBER = 3

def star(iteration, steps, leaves, seed, at=0):
    made = [Step(branch=leaves if i == at else 1, noise=i == at, train=i == at)
            for i in range(steps)]
    return TreePlan(roots=1, steps=tuple(made))

def odd(iteration, steps, leaves, seed, steps_too=0, leaves_too=0):
    return star(iteration, steps + steps_too, leaves + leaves_too, seed)

def nothing(iteration, steps, leaves, seed):
    return None
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "starry_plans.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(target, **args):
        options = CustomTreeOptions(function=target, args=args)
        return options.plan(iteration=2, steps=6, leaves=8, seed=0)

    return call


def test_a_function_is_called_with_its_args(make):
    plan = make("starry_plans:star", at=3)
    assert [step.branch for step in plan.steps] == [1, 1, 1, 8, 1, 1]
    assert make("starry_plans:odd") != plan


def test_a_plan_of_another_size_is_refused(make):
    with pytest.raises(PlanError, match="7 steps"):
        make("starry_plans:odd", steps_too=1)
    with pytest.raises(PlanError, match="group_size") as caught:
        make("starry_plans:odd", leaves_too=1)
    assert nearest(caught.value) == [9]


def test_what_is_no_plan_says_why(make):
    for target, words in [
        ("starry_plans", "module:attribute"),
        ("no_such_module_of_plans:star", "no_such_module_of_plans"),
        ("starry_plans:moon", "moon"),
        ("starry_plans:NUMBER", "3"),
        ("starry_plans:nothing", "None"),
    ]:
        with pytest.raises(PlanError, match=words):
            make(target)
