"""An option is written once, in a class free of torch, and a toy objective touches one file."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

import flowrl
from flowrl.config import objectives as options
from flowrl.config.validate import check_spo
from flowrl.errors import UserError
from flowrl.objectives.base import check_objective
from flowrl.trees.plan import Fan, Step, TreePlan

ODE, NOISY = Step(), Step(noise=True, train=True)
TWICE = replace(NOISY, branch=2)


def classes():
    """Name, file, fields and class of every class of the package."""
    for path in Path(flowrl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                fields = {
                    s.target.id: s.value
                    for s in node.body
                    if isinstance(s, ast.AnnAssign)
                    and isinstance(s.target, ast.Name)
                    and "ClassVar" not in ast.unparse(s.annotation)
                }
                yield node.name, path, fields


def test_no_field_stands_in_an_option_class_and_in_what_it_builds():
    fields: dict[str, set[str]] = {}
    for name, path, names in classes():
        if not name.endswith("Options") or path.parent.name == "config":
            fields.setdefault(name, set()).update(names)
    twice = {
        name: shared
        for name in fields
        # A Rollout and an Evaluation are results; no options build them.
        if name.endswith("Options")
        and name not in ("SamplingOptions", "HeldOutOptions")
        and (shared := fields[name] & fields.get(name.removesuffix("Options"), set()))
    }
    assert not twice


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


def test_what_is_no_objective_is_refused_by_its_name():
    with pytest.raises(UserError, match="mine:Old"):
        check_objective(object(), "mine:Old")


def test_no_option_of_an_objective_has_a_second_default():
    package = Path(flowrl.__file__).parent
    names = {
        field for _, path, fields in classes() if path.name == "objectives.py" for field in fields
    }
    for path in (package / "objectives").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                args = [*node.args.posonlyargs, *node.args.args]
                defaults = args[len(args) - len(node.args.defaults) :]
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                defaults += [arg for arg, default in pairs if default is not None]
                assert not names & {arg.arg for arg in defaults}, (path, node.name)
