"""What people type: options under the names that diffusers' own training scripts use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrl.errors import UserError

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
    "guidance_scale": "rollout.guidance",
    "num_inference_steps": "rollout.steps",
    "prompts": "prompts.train",
    "reward": "rewards",
}
_VALUES: dict[str, Callable[[str], list[str]]] = {
    "mixed_precision": lambda v: [f"pipeline.dtype={'fp32' if v == 'no' else v}"],
    "resolution": lambda v: [f"pipeline.height={v}", f"pipeline.width={v}"],
    "report_to": lambda v: [f"run.trackers=[{'' if v == 'none' else v}]"],
    "reward": lambda v: ["rewards=[" + ", ".join(f"{{name: '{n}'}}" for n in v.split(",")) + "]"],
}
_FLAGS = ("push_to_hub", "gradient_checkpointing")  # alone they are true
_SECTION_NAMES = ("prompts", "rewards")  # with dashes they are aliases, without them sections


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A command line sorted out: the recipe, its overrides `a.b=c`, and where to resume."""

    recipe: str
    overrides: list[str]
    resume: str | None


def sort_arguments(arguments: Sequence[str]) -> Request:
    """`quickstart --output_dir runs/a optim.lr=1e-4` -> recipe and overrides.

    Known names may be written `--name value`, `--name=value` or `name=value`, with dashes or
    underscores; dotted keys too. `--reward` may be repeated. Raises UserError for a name without
    a value and for two recipes.
    """
    recipes: list[str] = []
    overrides: list[str] = []
    rewards: list[str] = []
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
        if plain == "resume_from_checkpoint":
            resume = value
        elif name == "--reward":
            rewards.append(value)
        else:
            overrides += _translate(name, value)
    overrides += _translate("--reward", ",".join(rewards)) if rewards else []
    if len(recipes) > 1:
        raise UserError(
            f"Got two recipes, {recipes[0]!r} and {recipes[1]!r}, expected one; changes to it are "
            "written KEY=VALUE, as in optim.lr=1e-4."
        )
    return Request(recipe="".join(recipes), overrides=overrides, resume=resume)


def _next_value(word: str, plain: str, rest: list[str]) -> str:
    """The value of `--name` in the words after it, which loses it; flags may stand alone."""
    if plain in _FLAGS:
        said = bool(rest) and rest[0].lower() in ("true", "false")
        return rest.pop(0).lower() if said else "true"
    if not rest:
        raise UserError(f"{word} has no value: write {word} VALUE or KEY=VALUE.")
    return rest.pop(0)


def _translate(name: str, value: str) -> list[str]:
    key = name.removeprefix("--")
    plain = key.replace("-", "_")
    if plain == "hub_token":
        raise UserError(
            "--hub_token would leave a secret in the shell's history and the list of processes: "
            "set HF_TOKEN in the environment, or log in once with hf auth login."
        )
    if plain not in ALIASES or (key == name and plain in _SECTION_NAMES):
        return [f"{key}={value}"]
    return _VALUES[plain](value) if plain in _VALUES else [f"{ALIASES[plain]}={value}"]
