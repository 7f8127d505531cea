"""`flowrl recipes`: the recipes in the package."""

import re
from typing import Annotated

import typer

from flowrl.cli._console import AsJson, print_table, say
from flowrl.errors import UserError

NOT_RUN = "NOT RUN HERE"  # what the head of a recipe says until somebody has run it
METHODS = "method-"  # how the names of recipes begin that show one method each
CARD = re.compile(r"-(\d+)gb$")  # the end of a recipe's name: GB of the GPU that it was made for


def complete_recipe(incomplete: str) -> list[str]:
    """Return the presets that begin as what was typed."""
    from flowrl.config.load import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Only recipes with all of these in their row, such as flux nft."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List each recipe's method, trained rewards, GPU, and whether it ran from start to end.

    GPU is the memory that the recipe was planned for.

    Examples:

      flowrl recipes

      flowrl recipes sd3.5 nft

      flowrl recipes methods
    """
    from flowrl.config.load import preset_names

    names, wanted = preset_names(), [word.casefold() for word in words or []]
    methods = [name for name in names if name.startswith(METHODS)]
    if wanted[:1] == ["methods"]:
        names, wanted = methods, wanted[1:]
    elif not wanted:
        names = [name for name in names if name not in methods]
    rows = [_row(name) for name in names]
    rows = [r for r in rows if all(w in " ".join(map(str, r.values())).casefold() for w in wanted)]
    if not rows:
        raise UserError(
            f"No recipe matches all of {', '.join(wanted)}: `flowrl recipes` lists all."
        )
    print_table(rows, as_json=as_json, whole="recipe")
    if not as_json:
        say("GPU: the memory it was planned for. ran: whether it ran from start to end.")
        if not words:
            say(
                f"`flowrl recipes methods`: {len(methods)} more, one for each method, on the "
                "built-in SANA."
            )


def _row(name: str) -> dict[str, object]:
    from flowrl.config import load_config
    from flowrl.config.load import find_recipe
    from flowrl.config.methods import method_name

    config, text = load_config(name), find_recipe(name).read_text(encoding="utf-8")
    head = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    card = CARD.search(name)
    trained = [reward for reward in config.rewards if not reward.held_out]
    return {
        "recipe": name,
        "method": method_name(config),
        "trained rewards": ", ".join(dict.fromkeys(r.name for r in trained)),
        "GPU": f"{card[1]} GB" if card else "none",
        "ran": "no" if NOT_RUN in head else "yes",
    }
