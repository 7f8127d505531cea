"""`flowrl tree`: what a rollout's tree looks like and costs; loads no model."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowrl.cli._console import print_table, say
from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.trees.plan import TreePlan

PLAIN = {"length": 1, "strides": "1"}  # columns left out where all rows have these


def tree(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET", help="The kind of tree; none lists them.")
    ] = "",
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options of the preset.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, max=1000, help="Denoising steps.")] = 20,
    leaves: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Images of a prompt, group_size; 16 or the nearest that works.",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, in the numbers.")] = 1,
    iteration: Annotated[int, typer.Option(min=0, help="Of the training; windows move.")] = 0,
    seed: Annotated[int, typer.Option(help="Of random windows.")] = 0,
) -> None:
    """Show a rollout's tree and what it costs, before anything is sampled.

    Prints each step, the totals of all prompts, and one tree; loads no model.

    Its last lines are what to write in a recipe. Without PRESET it lists them.

    Examples:

      flowrl tree branch_grpo

      flowrl tree branch_grpo splits=[0,5,10,15] --steps 20 --leaves 16

      flowrl tree tree_grpo branch=3 window.size=2 --leaves 9 --iteration 5

      flowrl tree tempflow splits=[0,4,8] branch=4 --leaves 24
    """
    from flowrl.trees.plan import PlanError
    from flowrl.trees.presets import PRESETS

    if not preset:
        print_table([{"tree": name, "what": kind.__doc__} for name, kind in PRESETS.items()])
        return
    try:
        section: Any = _section(preset, changes or [])
        plan = _plan(section, leaves, iteration=iteration, steps=steps, seed=seed)
    except PlanError as error:
        raise UserError(f"{error}.") from error
    _show(plan, prompts)
    _show_recipe(section, plan)


def _plan(section: Any, leaves: int | None, **when: int) -> "TreePlan":
    """Return the plan; without a number of leaves, of 16 or the nearest number that works."""
    from flowrl.trees.plan import PlanError

    try:
        return section.plan(leaves=16 if leaves is None else leaves, **when)
    except PlanError as error:
        if leaves is not None or error.leaves is None:
            raise
        return section.plan(leaves=error.leaves, **when)


def _section(preset: str, changes: list[str]) -> Any:
    """Return the preset's options; nested ones change its defaults, as in window.size=2."""
    from pydantic import ValidationError

    from flowrl.config.load import merge, parse_overrides
    from flowrl.config.messages import format_errors
    from flowrl.trees.presets import PRESETS
    from flowrl.utils.fields import Options

    kind = PRESETS.get(preset)
    if kind is None:
        raise UserError(f"There is no tree {preset!r}: expected one of {', '.join(PRESETS)}.")
    options = parse_overrides(changes)
    inner = {
        name: field.default.model_dump()
        for name, field in kind.model_fields.items()
        if isinstance(field.default, Options)
    }
    try:
        return kind.model_validate(merge({"kind": preset} | inner, {"kind": preset} | options))
    except ValidationError as error:
        raise UserError(format_errors(kind, error)) from error


def _show_recipe(section: Any, plan: "TreePlan") -> None:
    """Print what to write in a recipe: the tree, and the credit published with it."""
    from flowrl.config.yaml12 import flow_yaml
    from flowrl.trees.plan import count

    options = flow_yaml(section.model_dump(mode="json"))
    size = f"rollout.num_inference_steps={len(plan.steps)} rollout.group_size={count(plan).leaves}"
    typer.echo(f'\nIn a recipe: {size} "rollout.tree={options}"')
    if section.credit:
        typer.echo(f'Its published credit: "objective.advantage={section.credit}"')


def _show(plan: "TreePlan", prompts: int) -> None:
    from flowrl.trees.plan import count
    from flowrl.trees.show import draw, table

    rows = table(plan, prompts)
    names = dict.fromkeys(name for row in rows for name in row)
    shown = [n for n in names if any(row.get(n) not in (None, PLAIN.get(n)) for row in rows)]
    print_table([{name: row.get(name, "") for name in shown} for row in rows])
    t = count(plan).times(prompts)
    say(
        f"\n{t.leaves} images from {t.forwards} forwards, {t.forwards / t.leaves:.2f} each; "
        f"separate chains take {t.sequential_forwards}, {t.sequential_forwards / t.forwards:.2f} "
        f"times as many.\n{t.edges} edges, {t.nodes} nodes, at most {t.peak_frontier} at once.\n"
        f"{t.trained_edges} trained edges, those from one node sharing a forward: "
        f"{t.train_forwards} in an update.\n"
    )
    typer.echo(draw(plan))
