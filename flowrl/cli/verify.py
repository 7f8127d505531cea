"""`flowrl verify`: is a file, a run or a part of a recipe what it should be?"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli._console import print_checks
from flowrl.errors import CheckResult, UserError

WIDTH = 14  # of topics


def verify(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|STORE|LORA|RECIPE [KEY=VALUE]",
            help="A folder, a LoRA file, or a recipe with changes to it.",
            show_default=False,
        ),
    ] = None,
    itself: Annotated[
        bool, typer.Option("--self", help="Check this installation's identities instead.")
    ] = False,
) -> None:
    """Check a run, an offline data set, a LoRA or a recipe, with a figure for each fact.

    Files are read whole: they must be undamaged, finite and consistent. Of a run one iteration is
    executed again and compared with what it logged, bit for bit. Of a recipe the backbone, the
    rewards and the objective are tried against their contracts, on a rollout of two prompts. Exits
    with 1 if something is wrong.

    Examples:

      flowrl verify runs/quickstart

      flowrl verify quickstart --reward my_package.mine:Sharpness

      flowrl verify my_lora.safetensors

      flowrl verify --self
    """
    wrong = []
    for result in _results(list(words or ()), itself):
        print_checks([result], WIDTH)
        if result.state == "problem":
            wrong.append(result.topic)
    if wrong:
        names = ", ".join(dict.fromkeys(wrong))
        raise UserError(f"{len(wrong)} checks failed, of {names}; lines marked !! say more.")


def _results(words: Sequence[str], itself: bool) -> Iterator[CheckResult]:
    if itself:
        if words:
            raise UserError(f"--self checks the installation: leave {words[0]!r} out.")
        from flowrl.verify.identities import verify_self

        return verify_self()
    if not words:
        raise UserError("Nothing to verify: name a run, a store, a LoRA or a recipe, or --self.")
    return _of_target(words)


def _of_target(words: Sequence[str]) -> Iterator[CheckResult]:
    """Check what lies at a path; or a recipe, where no folder or LoRA does."""
    from flowrl.backbones.lora_formats import FILE
    from flowrl.offline.format import METADATA
    from flowrl.training.checkpoint import CONFIG, STATE
    from flowrl.verify.files import check_checkpoint, check_lora, check_store
    from flowrl.verify.run import verify_run

    path = Path(words[0])
    if len(words) == 1 and (path.is_dir() or path.suffix == ".safetensors"):
        for name, check in (
            (CONFIG, verify_run), (METADATA, check_store), (STATE, check_checkpoint),
            (FILE, check_lora),
        ):  # fmt: skip
            if (path / name).is_file():
                return check(path)
        if path.is_file():
            return check_lora(path)
        raise UserError(
            f"{path} is neither a run ({CONFIG}), a store ({METADATA}), a checkpoint ({STATE}) nor "
            f"a folder with a LoRA ({FILE})"
        )
    return _of_recipe(words)


def _of_recipe(words: Sequence[str]) -> Iterator[CheckResult]:
    from flowrl.cli.train import recipe_request
    from flowrl.config import load_config
    from flowrl.verify.recipe import verify_recipe

    request = recipe_request(words, "flowrl verify quickstart")
    return verify_recipe(load_config(request.recipe, request.overrides))
