"""Command lines of `flowrl train` and others: a recipe, overrides, and diffusers' option names."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrl.config import Config
from flowrl.config.messages import show
from flowrl.errors import UserError

# Options of `flowrl train` itself, for suggestions.
TRAIN_OPTIONS = ("resume", "gpus", "dry-run", "print-config", "encode-only", "accept-changes")

# The names that diffusers' own training scripts use for the same options.
ALIASES = {
    "pretrained_model_name_or_path": "pipeline.path",
    "revision": "pipeline.revision",
    "mixed_precision": "pipeline.dtype",
    "resolution": "pipeline.height",
    "rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "adam_weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "max_train_steps": "run.iterations",
    "checkpointing_steps": "run.checkpoint_every",
    "output_dir": "run.output_dir",
    "seed": "run.seed",
    "report_to": "run.trackers",
    "push_to_hub": "run.push_to_hub",
    "hub_model_id": "run.hub_model_id",
    "gradient_checkpointing": "memory.gradient_checkpointing",
    "guidance_scale": "rollout.guidance_scale",
    "num_inference_steps": "rollout.num_inference_steps",
    "prompts": "prompts.train",
    "reward": "rewards",
}
_VALUES: dict[str, Callable[[str], list[str]]] = {
    "mixed_precision": lambda v: [f"pipeline.dtype={'fp32' if v == 'no' else v}"],
    "resolution": lambda v: [f"pipeline.height={v}", f"pipeline.width={v}"],
    "report_to": lambda v: [f"run.trackers=[{'' if v == 'none' else v}]"],
    "reward": lambda v: ["rewards=[" + ", ".join(f"{{name: '{n}'}}" for n in v.split(",")) + "]"],
}
# What a recipe says of its own prompts means nothing to others. Said first, so that the rest of the
# command line can say otherwise.
_OF_OWN_PROMPTS = (
    "prompts.balance=null", "prompts.weights=null", "prompts.allow_overlap=false",
    "prompts.held_out=0.1", "evaluation.prompts=null", "evaluation.balance=null",
)  # fmt: skip
_FLAGS = ("push_to_hub", "gradient_checkpointing")  # alone they are true
_SECTION_NAMES = ("prompts", "rewards")  # with dashes they are aliases, without them sections


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandArguments:
    """A sorted command line."""

    recipe: str
    overrides: list[str]  # a.b=c
    resume: str | None  # checkpoint


def sort_arguments(arguments: Sequence[str]) -> CommandArguments:
    """Sort `quickstart --output_dir runs/a optim.lr=1e-4` into recipe and overrides.

    Known names may be written `--name value`, `--name=value` or `name=value`, with dashes or
    underscores; dotted keys too. `--reward` may be repeated. `--prompts` and `--reward` replace
    what the recipe says of its own: a tenth of the prompts, at least 4, is held out, unless
    evaluation.prompts or prompts.held_out is given, too. Raises UserError for a name without a
    value and for two recipes.
    """
    recipes: list[str] = []
    overrides: list[str] = []
    rewards: list[str] = []
    replaced: list[str] = []
    resume: str | None = None
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") and "=" not in word:
            recipes.append(word)
            continue
        name, equals, value = word.partition("=")
        plain = name.lstrip("-").replace("-", "_")
        if not equals:
            value = _next_value(word, plain, rest)
        replaced += _OF_OWN_PROMPTS if name == "--prompts" else ()
        if plain in ("resume", "resume_from_checkpoint"):
            resume = value
        elif name == "--reward":
            rewards.append(value)
        else:
            overrides += _translate(name, value)
    overrides += _translate("--reward", ",".join(rewards)) if rewards else []
    if len(recipes) > 1:
        raise UserError(
            f"Got two recipes, {show(recipes[0])} and {show(recipes[1])}, expected one; changes "
            "are written KEY=VALUE, as in optim.lr=1e-4."
        )
    return CommandArguments(
        recipe="".join(recipes), overrides=[*dict.fromkeys(replaced), *overrides], resume=resume
    )


def _next_value(word: str, plain: str, rest: list[str]) -> str:
    """Take the value of `--name` out of the words after it; flags may stand alone."""
    if plain in _FLAGS:
        said = bool(rest) and rest[0].lower() in ("true", "false")
        return rest.pop(0).lower() if said else "true"
    if not rest:
        raise UserError(f"{word} has no value: write {word} VALUE or KEY=VALUE.")
    return rest.pop(0)


def _translate(name: str, value: str) -> list[str]:
    key = name.removeprefix("--")
    plain = key.replace("-", "_")
    if plain not in ALIASES or (key == name and plain in _SECTION_NAMES):
        if key != name and "." not in key and plain not in Config.model_fields:
            near = difflib.get_close_matches(plain[:100], [*ALIASES, *TRAIN_OPTIONS], 1, 0.5)
            hint = f" Did you mean --{near[0]}?" if near else " Options are written KEY=VALUE."
            raise UserError(f"There is no option {show(name)}.{hint}")
        return [f"{key}={value}"]
    return _VALUES[plain](value) if plain in _VALUES else [f"{ALIASES[plain]}={value}"]
