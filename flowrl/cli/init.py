"""`flowrl init`: write a recipe for a pipeline, prompts and rewards of your own."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from flowrl.cli._console import say
from flowrl.cli.recipes import CARD
from flowrl.errors import UserError

FEW_STEPS = """\
rollout:
  num_inference_steps: {steps} # to which the checkpoint was distilled: others undo that

"""
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

{few_steps}evaluation:
  prompts: null # or a file of your own in place of held_out
  balance: null
{evaluation_steps}
rewards: # what is learned; add {{name: ..., held_out: true}} for what is only measured
{rewards}

run:
  output_dir: runs/{name}
"""

T = TypeVar("T")


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
        str | None, typer.Option(metavar="24GB", help="GPU memory; 0 for a CPU.")
    ] = None,
) -> None:
    """Ask for model, prompts, reward and GPU memory; write a commented recipe.

    What is given on the command line is not asked. An existing file is not overwritten.

    Examples:

      flowrl init

      flowrl init mine.yaml --model tiny-sd3 --prompts prompts.txt --reward brightness --memory 0
    """
    from flowrl.config import load_config
    from flowrl.utils.files import write_text

    if file.exists():
        raise UserError(f"{file} is there already: name another file, as in flowrl init mine.yaml.")
    name, kind = _answer(model, "Which pipeline", "tiny-sd3", lambda text: (text, class_of(text)))
    source = _answer(prompts, "File with your prompts, one a line", "prompts.txt", _check_prompts)
    likely = "brightness" if name.startswith("tiny-") else "pickscore"
    question = "Reward: a name of docs/rewards.md, or module:attribute"
    first = _answer((reward or [None])[0], question, likely, _check_reward)
    rewards = [first, *map(_check_reward, (reward or [])[1:])]
    size, parent = _answer(
        memory, "Memory of the GPU, such as 24GB (0 for none)", "0",
        lambda text: (text.strip(), parent_of(kind, _bytes(text), name)),
    )  # fmt: skip
    write_text(file, recipe_text(file, parent, name, source, rewards))
    load_config(file)  # as flowrl train will
    if _bytes(size) and class_of(load_config(parent).pipeline.path) != kind:
        say(f"No recipe trains {kind} yet: {parent} is the nearest in size.")
    say(f"{file} is written: {parent} with your own pipeline, prompts and rewards.\n")
    memory_words = f" --memory {size}" if _bytes(size) else ""
    say(f"next  flowrl plan {file}{memory_words}\n      flowrl train {file} --dry-run")
    say(f"      flowrl train {file}")


def _answer(value: str | None, question: str, likely: str, check: Callable[[str], T]) -> T:
    """Check an option, or ask until an answer passes its check; earlier answers stay."""
    if value is not None:
        return check(value)
    while True:
        try:
            return check(str(typer.prompt(question, default=likely)).strip())
        except UserError as error:
            say(f"{error}\n", err=True)


def _bytes(memory: str) -> int:
    from flowrl.planning.plan import parse_memory

    return 0 if memory.strip() == "0" else parse_memory(memory)


def class_of(model: str) -> str:
    """Return a pipeline's class by its model_index.json. Raises UserError if it cannot train."""
    from flowrl.backbones.families import check_trainable
    from flowrl.planning.model_specs import pipeline_class

    kind = pipeline_class(model)
    check_trainable(kind)
    return kind


def parent_of(kind: str, memory: int, model: str) -> str:
    """Return the preset to start from: DiffusionNFT first, the largest GPU.

    It is of the same checkpoint, else of the same class and the nearest size, else of the nearest
    size. memory: bytes of the GPU, 0 for a CPU. Raises UserError where none fits.
    """
    from flowrl.backbones.families import FAMILIES
    from flowrl.config import load_config
    from flowrl.config.load import preset_names
    from flowrl.planning.model_specs import pipeline_class, spec_for, spec_name

    presets = {name: load_config(name).pipeline.path for name in preset_names()}
    if not memory:
        if spec_name(model) is not None or spec_for(model).weights > 2 * 10**9:
            raise UserError(f"{model} needs a GPU: name its memory with --memory 24GB.")
        quick = {"quickstart", *(f"quickstart-{family.name}" for family in FAMILIES.values())}
        same = [n for n in presets if n in quick and pipeline_class(presets[n]) == kind]
        return (same or ["quickstart"])[0]  # which has nothing of a class but its small sizes
    sizes = {name: int(m[1]) * 10**9 for name in presets if (m := CARD.search(name))}
    same = [name for name in sizes if pipeline_class(presets[name]) == kind]
    same = same or [name for name in sizes if "-nft-" in name]
    if (spec := spec_name(model)) is not None:
        same = [n for n in same if spec_name(presets[n]) == spec] or same
    else:
        size = spec_for(model).parameters
        parameters = {path: spec_for(path).parameters for path in {presets[name] for name in same}}
        nearest = min(parameters, key=lambda path: (abs(math.log(parameters[path] / size)), path))
        same = [name for name in same if presets[name] == nearest]
    if not (fitting := [name for name in same if sizes[name] <= memory]):
        least = min(same, key=lambda name: (sizes[name], name))
        raise UserError(
            f"No recipe for {model} fits {memory / 1e9:.0f} GB: the smallest, {least}, is for "
            f"--memory {sizes[least] / 1e9:.0f}GB. A smaller pipeline needs less."
        )
    return max(fitting, key=lambda name: ("-nft-" in name, sizes[name], name))


def recipe_text(file: Path, parent: str, model: str, prompts: str, rewards: Sequence[str]) -> str:
    """Return a commented recipe."""
    from flowrl.config.yaml12 import dump_yaml
    from flowrl.planning.model_specs import MODEL_SPECS, spec_name

    name = spec_name(model)
    steps = None if name is None else MODEL_SPECS[name].few_steps.get(model)

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
        few_steps="" if steps is None else FEW_STEPS.format(steps=steps),
        evaluation_steps="" if steps is None else f"  num_inference_steps: {steps}\n",
    )


def _check_reward(name: str) -> str:
    from flowrl.scoring.spec import load_reward

    load_reward(name)
    return name


def _check_prompts(source: str) -> str:
    """Read the first prompt; data sets of the Hub are not looked up."""
    from flowrl.prompts.records import load_prompts
    from flowrl.prompts.sources import HUB

    if not source.startswith(HUB):
        load_prompts(source, limit=1)
    return source
