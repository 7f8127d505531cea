"""What is added touches one file, and one line of a table."""

import ast
from pathlib import Path
from typing import get_args

import flowrl
from flowrl.config.objectives import Objective
from flowrl.trees.presets import PRESETS

PACKAGE = Path(flowrl.__file__).parent


def test_a_kind_of_objective_or_tree_is_named_in_its_options_alone():
    """So that a new one is its file and its options, and no table elsewhere knows it."""
    kinds = {section.model_fields["kind"].default for section in get_args(get_args(Objective)[0])}
    kinds |= PRESETS.keys()
    kinds -= {"custom", "grpo", "ode", "dpo", "kto"}  # defaults; votes are learned by the last two
    assert len(kinds) > 25
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name + "/" + path.name in ("config/objectives.py", "trees/presets.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            assert not (isinstance(node, ast.Constant) and node.value in kinds), (path, node.value)
