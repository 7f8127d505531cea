"""Options of objectives: which are refused, and that none has a second default."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

import flowrl
from flowrl.config import objectives as options
from flowrl.config.validate import check_spo
from flowrl.trees.plan import Fan, Step, TreePlan
from flowrl.utils.fields import Options

ODE, NOISY = Step(), Step(noise=True, train=True)
TWICE = replace(NOISY, branch=2)


def test_options_that_cannot_work_are_refused():
    with pytest.raises(ValidationError):
        options.FlowBPBridgeOptions(steps=1)
    untrained = replace(TWICE, train=False)
    for plan in (
        TreePlan(4, (NOISY, NOISY, ODE)),
        TreePlan(2, (untrained, NOISY, ODE)),
        TreePlan(2, (ODE,) * 3, fans=(Fan(step=0, width=1),)),
    ):
        with pytest.raises(ValueError, match="spo"):
            check_spo(plan)
    check_spo(TreePlan(1, (TWICE, NOISY, ODE)))
    check_spo(TreePlan(2, (ODE,) * 3, fans=(Fan(step=1, width=2),)))


def test_no_option_of_an_objective_has_a_second_default():
    sections = [c for c in vars(options).values() if isinstance(c, type) and issubclass(c, Options)]
    names = {name for section in sections for name in section.model_fields} - {"kind"}
    assert {"kl_coef", "clip_nats"} < names
    for path in (Path(flowrl.__file__).parent / "objectives").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                args = [*node.args.posonlyargs, *node.args.args]
                defaults = args[len(args) - len(node.args.defaults) :]
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                defaults += [arg for arg, default in pairs if default is not None]
                assert not names & {arg.arg for arg in defaults}, (path, node.name)
