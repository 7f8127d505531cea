"""The form that starts a run: its fields become words of `flowrl plan` and `flowrl train`."""

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config import Config, load_config
from flowrl.config.arguments import sort_arguments
from flowrl.config.load import find_recipe, parse_overrides, preset_names
from flowrl.errors import UserError
from flowrl.utils.digests import digest

FOLDER = re.compile(r"\w[\w.+-]{0,99}")
TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)
FEWEST_PROMPTS = 8  # of which flowrl holds 4 out
REWARDS = {  # and what each needs
    "pickscore": "which of two images people would pick; any prompts; 4 GB download",
    "hpsv2": "people's preferences, HPSv2.1; any prompts; 4 GB download",
    "hpsv3": "people's preferences, HPSv3; any prompts; 16 GB download, 15.5 GB of GPU memory",
    "clipscore": "how well image and prompt agree; any prompts; 1.7 GB download",
    "aesthetic": "LAION's aesthetic predictor; any prompts; 1.7 GB download",
    "ocr": "how much of a text can be read; each prompt has one text in quotes",
    "geneval": "objects, counts, colours and places; each prompt has the metadata tag and include",
    "compressibility": "small JPEG files; any prompts",
    "incompressibility": "large JPEG files; any prompts",
    "brightness": "bright images, to try things out; any prompts",
    "agreement": "images of a prompt's wordings alike; beside another reward, with prompts.refiner",
    "diversity": "variety; beside another reward, at least 3 images of a prompt",
    "vlm_judge": "what a vision-language model says; a server, set in rewards.0.args",
    "vlm_questions": "answers to questions; a server, and the metadata vqa_list of each prompt",
    "pairwise": "wins against other images of the prompt; a server, set in rewards.0.args",
    "preference": "what a store of pairs says; a store, set in rollout.store",
    "taste": "a voter's taste, beside a reward that reads the prompt; votes, set in rewards.0.args",
    "tiny_colors": "colours of the tiny world; the built-in tiny models and their prompts",
    "tiny_judge": "requests of the tiny world met; the built-in tiny models and their prompts",
    "tiny_proxy": "the same, and it can be gamed; the built-in tiny models and their prompts",
    "tiny_quality": "clean shapes, 1 to 5; the built-in tiny models and their prompts",
}


class FieldRefusal(UserError):
    """The value of a field of the form cannot be used."""

    def __init__(self, field: str, sentence: str):
        super().__init__(sentence)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForm:
    """What was entered; an empty field leaves to the recipe what it says."""

    recipe: str = ""
    model: str = ""
    prompts: str = ""  # pasted, one a line
    prompt_file: str = ""
    reward: str = ""
    iterations: str = ""
    folder: str = ""
    changes: tuple[str, ...] = ()

    def words(self, root: Path) -> tuple[str, ...]:
        """Return the words of a command; pasted prompts are in a file below `root` then.

        Raises FieldRefusal for the first field that cannot be used.
        """
        words = [_checked("recipe", checked_recipe, self.recipe.strip())]
        if model := self.model.strip():
            words.append(f"pipeline.path={_quoted(model)}")
        text = checked_prompts(self.prompts)
        if text and self.prompt_file.strip():
            raise FieldRefusal("prompt_file", "paste prompts or name a file, not both")
        # Named by its content: other prompts never replace those of a run.
        pasted = root / f"prompts-{digest(text.encode())[:12]}.txt"
        path = str(pasted) if text else self.prompt_file.strip()
        words += [f"--prompts={_quoted(path)}"] if path else []
        if self.reward:
            words.append(f"--reward={checked_reward(self.reward.strip())}")
        if count := self.iterations.strip():
            words.append(f"run.iterations={count}")
        words += _checked("changes", checked_changes, self.changes)
        request = sort_arguments(words)
        _checked("form", lambda r: load_config(r.recipe, r.overrides), request)
        if text:
            from flowrl.utils.files import write_text  # which loads torch

            write_text(pasted, text)
        return tuple(words)


@functools.cache
def choices() -> dict[str, Any]:
    """Return what the fields offer: recipes with their models, models, rewards."""
    recipes = []
    for name in preset_names():
        head = find_recipe(name).read_text(encoding="utf-8").partition("\n#\n")[0]
        about = " ".join(line.lstrip("# ") for line in head.splitlines() if line.startswith("#"))
        recipes.append({"name": name, "model": load_config(name).pipeline.path, "about": about})
    models = sorted({one["model"] for one in recipes}, key=lambda name: ("/" in name, name))
    return {"recipes": recipes, "models": models, "rewards": REWARDS}


# --- fields --------------------------------------------------------------------------------------


def checked_recipe(recipe: str) -> str:
    """Return a preset's name, or the path of a file. Raises UserError for anything else."""
    return recipe if recipe in preset_names() else str(find_recipe(recipe).resolve())


def checked_changes(changes: Sequence[str]) -> tuple[str, ...]:
    """Return changes KEY=VALUE of a recipe. Raises UserError for flags and other words."""
    texts = tuple(text.strip() for text in changes if text.strip())
    changed = parse_overrides(texts)
    if "output_dir" in changed or "output_dir" in (changed.get("run") or {}):
        raise UserError("leave run.output_dir out: enter the folder in its own field")
    if flag := next((key for key in changed if key not in Config.model_fields), None):
        raise UserError(f"{flag} is no section of a recipe, as optim is in optim.lr=1e-4")
    return texts


def checked_prompts(text: str) -> str:
    """Return the text of a file of pasted prompts, "" for none. Raises FieldRefusal for too few."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and len(set(lines)) < FEWEST_PROMPTS:
        raise FieldRefusal(
            "prompts", f"got {len(set(lines))} different prompts, expected at least "
            f"{FEWEST_PROMPTS}: some are held out to measure on"
        )  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


def checked_reward(name: str) -> str:
    """Return a built-in reward or module:Class. Raises FieldRefusal for anything else."""
    if name not in REWARDS and not TARGET.fullmatch(name):
        raise FieldRefusal(
            "reward", f"{name[:100]!r} is no built-in reward and not written module:Class"
        )
    return name


def checked_folder(root: Path, name: str) -> Path:
    """Return the new folder of a run. Raises FieldRefusal for a name that leads elsewhere."""
    if not FOLDER.fullmatch(name):
        raise FieldRefusal(
            "folder", f"the folder is {name[:60]!r}, expected a name of letters, digits and .+-_"
        )
    if (root / name).exists():
        raise FieldRefusal("folder", f"there is a folder {name} already: enter another name")
    return root / name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _checked(field: str, check: Any, value: Any) -> Any:
    """Return what `check` makes of a field; its UserError becomes the field's."""
    try:
        return check(value)
    except UserError as error:
        raise FieldRefusal(field, str(error)) from error
