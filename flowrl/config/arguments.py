"""Command lines of `flowrl train` and others: a recipe, and changes of it."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.config.messages import show
from flowrl.errors import UserError

# Options of the commands that take a recipe, for suggestions.
NAMES = (
    "prompts", "reward", "resume", "gpus", "dry-run", "print-config", "encode-only",
    "accept-changes",
)  # fmt: skip
# What a recipe says of its own prompts means nothing to others. Said first, so that the rest of the
# command line can say otherwise.
_OF_OWN_PROMPTS = (
    "prompts.balance=null", "prompts.weights=null", "prompts.allow_overlap=false",
    "prompts.held_out=0.1", "evaluation.prompts=null", "evaluation.balance=null",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandArguments:
    """A sorted command line."""

    recipe: str
    overrides: list[str]  # a.b=c


def sort_arguments(arguments: Sequence[str]) -> CommandArguments:
    """Sort `quickstart --reward ocr optim.lr=1e-4` into recipe and overrides.

    `--reward` may be repeated. `--prompts` and `--reward` replace what the recipe says of its own:
    a tenth of the prompts, at least 4, is held out, unless evaluation.prompts or prompts.held_out
    is given, too. Raises UserError for other options, for a name without a value and for two
    recipes.
    """
    recipes: list[str] = []
    overrides: list[str] = []
    rewards: list[str] = []
    replaced: tuple[str, ...] = ()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            (overrides if equals else recipes).append(word)
            continue
        if name not in ("--prompts", "--reward"):
            raise UserError(_unknown(name))
        if not equals and not rest:
            raise UserError(f"{word} has no value: write {word} VALUE.")
        value = value if equals else rest.pop(0)
        if name == "--reward":
            rewards += value.split(",")
        else:
            overrides.append(f"prompts.train={value}")
            replaced = _OF_OWN_PROMPTS
    if rewards:
        overrides.append("rewards=[" + ", ".join(f"{{name: '{name}'}}" for name in rewards) + "]")
    if len(recipes) > 1:
        raise UserError(
            f"Got two recipes, {show(recipes[0])} and {show(recipes[1])}, expected one; changes "
            "are written KEY=VALUE, as in optim.lr=1e-4."
        )
    return CommandArguments(recipe="".join(recipes), overrides=[*replaced, *overrides])


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lstrip("-")[:100], NAMES, 1, 0.6)
    hint = f"Did you mean --{near[0]}?" if near else "Changes are written KEY=VALUE."
    return f"There is no option {show(name)}. {hint}"
