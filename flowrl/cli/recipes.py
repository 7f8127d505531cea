"""`flowrl recipes` and `flowrl init`: which recipes there are, and one of your own."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.cli._console import AsJson, print_table
from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.config import Config

NOT_RUN = "NOT RUN HERE"  # what the head of a recipe says until somebody has run it
CARD = re.compile(r"-(\d+)gb$")  # the end of a recipe's name: GB of the GPU that it was made for
FAMILIES = {  # classes of diffusers' pipelines
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "SanaPipeline": "sana",
}
NAMES = {"stable-diffusion-3": "sd3", "tiny-sd3": "sd3", "flux": "flux", "sana": "sana"}
RECIPE = """\
# {what}
#
#   flowrl plan {file}                # does it fit, and how much work is it
#   flowrl train {file} --dry-run     # the whole recipe in small, in a minute
#   flowrl train {file}
#
# Every other option is the parent's: flowrl train {file} --print-config shows them all,
# and flowrl explain KEY says what one means.
extends: {parent}

pipeline:
  path: {model} # a folder, or a name on the Hub

prompts:
  train: {prompts} # one prompt a line, or .jsonl with metadata for the rewards
  balance: null # or a key of the metadata whose values are sampled equally often
  allow_overlap: false
  held_out: 0.1 # of the prompts, never trained on: base and LoRA are compared on them

evaluation:
  prompts: null # or a file of your own in place of held_out
  balance: null
  quality: null

rewards: # what is learned; add {{name: ..., held_out: true}} for what is only measured
{rewards}

run:
  output_dir: runs/{name}
"""


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
    """List the recipes: method, trained rewards, GPU, and whether it has run as a whole.

    GPU is the memory that the recipe was planned for.

    Examples:

      flowrl recipes

      flowrl recipes sd3.5 nft
    """
    from flowrl.config.load import preset_names

    rows = [_row(name) for name in preset_names()]
    wanted = [word.casefold() for word in words or []]
    found = [r for r in rows if all(w in " ".join(map(str, r.values())).casefold() for w in wanted)]
    if not found:
        raise UserError(f"No recipe has all of {', '.join(wanted)}: flowrl recipes lists them.")
    print_table(found, as_json=as_json, whole="recipe")


def _row(name: str) -> dict[str, object]:
    from flowrl.config import load_config
    from flowrl.config.load import find_recipe
    from flowrl.config.methods import method_name

    config, head = load_config(name), _head(find_recipe(name))
    trained = [reward for reward in config.rewards if not reward.held_out]
    return {
        "recipe": name,
        "method": method_name(config),
        "trained rewards": ", ".join(dict.fromkeys(r.name for r in trained)),
        "GPU": _card(name),
        "ran": "no" if NOT_RUN in head else "yes",
    }


def _head(path: Path) -> str:
    """Return the comment that a recipe begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


def _card(name: str) -> str:
    match = CARD.search(name)
    return f"{match[1]} GB" if match else "none"


# --- flowrl init ---------------------------------------------------------------------------------


def init(
    file: Annotated[Path, typer.Argument(help="The recipe to write.")] = Path("recipe.yaml"),
    model: Annotated[
        str | None, typer.Option(help="A diffusers pipeline: a folder or a Hub name.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="One prompt a line, or .jsonl.")
    ] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="Built-in name or module:attribute; may be repeated.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="24GB", help="Of the GPU; 0 for a laptop's CPU.")
    ] = None,
) -> None:
    """Ask for model, prompts, reward and card; write a commented recipe, and plan it.

    What is given on the command line is not asked. A file that is there already stays as it is.

    Examples:

      flowrl init

      flowrl init mine.yaml --model tiny-sd3 --prompts prompts.txt --reward brightness --memory 0
    """
    from flowrl.planning.plan import parse_memory
    from flowrl.utils.files import write_text

    if file.exists():
        raise UserError(f"{file} is there already: name another file, as in flowrl init mine.yaml.")
    model = model or _ask("Which pipeline", "tiny-sd3")
    family = family_of(model)
    source = prompts or _ask("File with your prompts, one a line", "prompts.txt")
    _check_prompts(source)
    likely = "brightness" if model.startswith("tiny-") else "pickscore"
    names = reward or [_ask("Reward: a name of docs/rewards.md, or module:attribute", likely)]
    memory = memory or _ask("Memory of the GPU, such as 24GB (0 for none)", "0")
    size = 0 if memory.strip() == "0" else parse_memory(memory)
    parent = parent_of(family, size, model)
    text = recipe_text(file, parent, model, source, names)
    config = _check(text, file)
    write_text(file, text)
    typer.echo(f"{file} is written: {parent} with your own pipeline, prompts and rewards.\n")
    _show_plan(config, size, f"flowrl plan {file} --memory {memory.strip()}")
    typer.echo(f"next  flowrl train {file} --dry-run\n      flowrl train {file}")


def _ask(question: str, likely: str) -> str:
    """Return what a person types, or the likely answer."""
    return str(typer.prompt(question, default=likely)).strip()


def family_of(model: str) -> str:
    """Return the backbone of a pipeline by its model_index.json or its name. Raises UserError."""
    index = Path(model) / "model_index.json"
    if index.is_file():
        try:
            name = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{index} is no pipeline's index: {error}.") from error
        if name in FAMILIES:
            return FAMILIES[name]
        raise UserError(
            f"{model} is a {name}; flowrl has {', '.join(FAMILIES)}, and yours in one file "
            "(examples/z_image.py)."
        )
    found = [family for part, family in NAMES.items() if part in model.casefold()]
    if not found:
        raise UserError(
            f"{model} is no folder with a model_index.json, and its name says no family: name a "
            "Stable Diffusion 3, FLUX.1 or SANA, such as stabilityai/stable-diffusion-3.5-medium."
        )
    return found[0]


def parent_of(family: str, memory: int, model: str) -> str:
    """Return the preset to start from: of the family, DiffusionNFT first, for the largest card.

    memory: bytes of the GPU, 0 for a CPU. Raises UserError when no preset is for so small a card.
    """
    from flowrl.config.load import preset_names

    if not memory:
        if not model.startswith("tiny-"):
            raise UserError(
                f"{model} needs a GPU: say how large with --memory 24GB, or take tiny-{family}."
            )
        return "quickstart" if family == "sd3" else f"quickstart-{family}"
    starts = {"sd3": "sd3.5-large" if "large" in model.casefold() else "sd3.5-medium",
              "flux": "flux.1-dev", "sana": "sana-1.6b"}  # fmt: skip
    sizes = {n: int(m[1]) * 10**9 for n in preset_names() if (m := CARD.search(n))}
    fitting = [n for n, s in sizes.items() if n.startswith(starts[family]) and s <= memory]
    if not fitting:
        least = min(s for n, s in sizes.items() if n.startswith(starts[family]))
        raise UserError(
            f"No recipe of {starts[family]} is for {memory / 1e9:.0f} GB, the smallest is for "
            f"{least / 1e9:.0f}: take a smaller pipeline, or write a recipe and see flowrl plan."
        )
    return max(fitting, key=lambda name: ("-nft-" in name, sizes[name], name))


def recipe_text(file: Path, parent: str, model: str, prompts: str, rewards: Sequence[str]) -> str:
    """Return a commented recipe."""
    from flowrl.config.yaml12 import dump_yaml

    def scalar(text: str) -> str:
        return dump_yaml([text]).removeprefix("- ").strip()

    return RECIPE.format(
        what=f"{model}, aligned to {', '.join(rewards)}.",
        file=file,
        parent=parent,
        model=scalar(model),
        prompts=scalar(prompts),
        rewards="\n".join(f"  - {{name: {json.dumps(name)}}}" for name in rewards),
        name=scalar(file.stem),
    )


def _check(text: str, file: Path) -> "Config":
    """Read the recipe as `flowrl train` will. Raises UserError for an answer that is wrong."""
    import tempfile

    from flowrl.config import load_config
    from flowrl.scoring.spec import load_reward

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file.name
        path.write_text(text, encoding="utf-8")
        config = load_config(path)
    for entry in config.rewards:
        load_reward(entry.name)
    return config


def _check_prompts(source: str) -> None:
    """Read the first prompt. Raises UserError for a file that is missing, or is none of prompts.

    Data sets of the Hub are not asked for: nothing is downloaded here.
    """
    from flowrl.prompts.records import load_prompts
    from flowrl.prompts.sources import HUB

    if not source.startswith(HUB):
        load_prompts(source, limit=1)


def _show_plan(config: "Config", memory: int, planning: str) -> None:
    """Print whether a recipe fits, and the work of an iteration.

    memory: bytes of the GPU, 0 for a CPU. planning: the command that says what to change.
    """
    import psutil

    from flowrl.planning.plan import make_plan

    of = "a GPU" if memory else "this machine's memory"
    there = memory or psutil.virtual_memory().total
    found = make_plan(config)  # without the memory: the search for what to change takes its time
    if found.peak is None:
        typer.echo(f"Whether it fits is not known: {found.unknown}.")
    else:
        fits = found.peak.total <= there
        size = f"{of} of {there / 1e9:.1f} GB, with {found.peak.total / 1e9:.1f} at its peak"
        how = "" if fits else f": {planning} says what to change"
        typer.echo(f"It {'fits' if fits else 'does not fit'} {size}{how}.")
    work = found.work.first
    typer.echo(
        f"An iteration draws {work.images + work.candidates:,} images by "
        f"{work.previews + work.sampling:,} forwards of the network, and learns by at most "
        f"{work.training:,} more with gradients, in {work.updates:,} "
        f"{'update' if work.updates == 1 else 'updates'}.\n"
    )
