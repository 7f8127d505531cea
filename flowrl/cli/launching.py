"""What the training scripts of the families do, on each process that accelerate starts."""

from collections.abc import Sequence

from flowrl.errors import UserError

FLAGS = ("--dry-run", "--print-config")  # of `flowrl train`


def launch(words: Sequence[str], *, family: str, recipe: str) -> None:
    """`flowrl train` with `recipe` where the words name none, for one family of pipelines.

    words: of the command line. Raises UserError for a recipe of another family.
    """
    from flowrl.cli.train import saved_recipe, train
    from flowrl.config import load_config
    from flowrl.config.aliases import sort_arguments

    flags = [word.replace("_", "-") in FLAGS for word in words]
    rest = [word for word, is_flag in zip(words, flags, strict=True) if not is_flag]
    request = sort_arguments(rest)
    if not request.recipe and request.resume in (None, "latest"):
        rest, request = [recipe, *rest], sort_arguments([recipe, *rest])
    config = load_config(request.recipe or saved_recipe(request.resume), request.overrides)
    found = config.pipeline.backbone
    if found != family:
        raise UserError(
            f"{request.recipe or request.resume} is a recipe for {found}, but this script trains "
            f"{family}: take {script_of(found)}, or a recipe such as {recipe}"
        )
    asked = {word.replace("_", "-") for word, is_flag in zip(words, flags, strict=True) if is_flag}
    train(rest, dry_run="--dry-run" in asked, print_config="--print-config" in asked)


def script_of(family: str) -> str:
    """Where another family is trained; somebody's own backbone, with any recipe's command."""
    return "flowrl train" if ":" in family else f"scripts/train_{family}.py"
