"""`flowrl vote`: your taste in some clicks, and a LoRA that has it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowrl.cli._console import Lora
from flowrl.cli.recipes import complete_recipe
from flowrl.cli.train import print_what_next, recipe_request
from flowrl.cli.ui import (
    AllowedHosts,
    Host,
    OpenBrowser,
    Port,
    TokenVariable,
    page_token,
    serve_page,
)
from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.config import Config


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|RUN|FOLDER|KEY=VALUE",
        help="A preset's name or a YAML file, a run, whose LoRA then draws, or a folder of images; "
        "then changes to the recipe.",
        show_default=False,
        autocompletion=complete_recipe,
    ),
]


def vote(  # noqa: PLR0913  # an argument for each option
    words: Words = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Folder of images and votes.")
    ] = Path("votes"),
    images: Annotated[
        Path | None,
        typer.Option(help="A folder of images that says their prompts, in place of drawing some."),
    ] = None,
    lora: Lora = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to draw images of.")] = 60,
    per_prompt: Annotated[int, typer.Option(min=2, help="Images of each prompt.")] = 8,
    goal: Annotated[int, typer.Option(min=1, help="Votes to count up to.")] = 50,
    pairs: Annotated[
        Literal["random", "informative"],
        typer.Option(help="Ask any pair, or the one that tells most about your taste."),
    ] = "random",
    seed: Annotated[int, typer.Option(min=0, help="Of the images and the order.")] = 0,
    train: Annotated[
        bool, typer.Option("--train", help="Train on the votes there are, and ask nothing.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write the votes as pairs: .jsonl as flowrl, or .json as HPDv3 has them."
        ),
    ] = None,
    host: Host = "127.0.0.1",
    allow_host: AllowedHosts = None,
    port: Port = 8402,
    token_env: TokenVariable = None,
    open_browser: OpenBrowser = False,
) -> None:
    """Say which of two images you like, on a page; then train a LoRA on your votes.

    Keys: 1, 2, t (tie), s (skip), u (undo). Each vote is on disk at once: stop with Ctrl-C, and the
    same command goes on. --train then runs DPO on the votes, or KTO with objective.kind=kto; with
    --open the gallery opens after it.

    Examples:

      flowrl vote quickstart-vote

      flowrl vote quickstart-vote --train

      flowrl vote runs/quickstart-sana -o votes/aligned

      flowrl vote votes --export votes.jsonl
    """
    words, images, lora = _target(words or [], images, lora)
    folder = images or output_dir
    if export is not None:
        _export(folder, export)
        return
    if train:
        from flowrl.voting.learn import train_on_votes

        config = _config(words)
        trained = train_on_votes(config, folder, lora=lora)
        print_what_next(config, trained)
        if open_browser and trained.gallery is not None:
            typer.launch(trained.gallery.resolve().as_uri())
        return
    from flowrl.utils.files import locked_folder
    from flowrl.voting.app import Questions, make_app
    from flowrl.voting.ballot import Ballot
    from flowrl.voting.candidates import read_candidates
    from flowrl.voting.learn import draw_candidates, encoder_of

    with locked_folder(folder, "images", "votes"):
        if images is None:
            draw_candidates(
                _config(words), folder, prompts=prompts, per_prompt=per_prompt, lora=lora, seed=seed
            )
        informative = pairs == "informative"
        candidates = read_candidates(folder, encoder_of(_config(words)) if informative else None)
        questions = Questions(
            candidates, Ballot(folder), goal=goal, informative=informative, seed=seed
        )
        token = page_token(host, token_env)
        serve_page(
            lambda hosts: make_app(questions, token=token, hosts=hosts),
            f"images in {os.fspath(folder)}", host, port, token, open_browser, allow_host or (),
        )  # fmt: skip


def _target(
    words: list[str], images: Path | None, lora: str | None
) -> tuple[list[str], Path | None, str | None]:
    """Return words, images and LoRA, with what the first word says where it names a folder.

    A run is its recipe and its LoRA; any other folder is one of images, or of earlier votes. A
    preset's name is the preset.
    """
    from flowrl.config.load import preset_names

    folder = Path(words[0]) if words else None
    if folder is None or words[0] in preset_names() or not folder.is_dir():
        return words, images, lora
    recipe = folder / "config.yaml"
    if recipe.is_file():
        return [str(recipe), *words[1:]], images, lora or str(folder)
    return words[1:], folder, lora


def _config(words: list[str]) -> "Config":
    from flowrl.config import load_config

    request = recipe_request(words, "flowrl vote quickstart-sana")
    if any(change.startswith("run.output_dir=") for change in request.overrides):
        raise UserError(
            "run.output_dir is not for votes: the run lies with the images, and -o is their folder."
        )
    return load_config(request.recipe, request.overrides)


def _export(folder: Path, path: Path) -> None:
    from flowrl.voting.ballot import Ballot, write_pairs

    kinds: dict[str, Literal["flowrl", "hpdv3"]] = {".jsonl": "flowrl", ".json": "hpdv3"}
    if path.suffix not in kinds:
        raise UserError(f"--export {path} ends with neither .jsonl (flowrl) nor .json (HPDv3).")
    written = write_pairs(Ballot(folder).votes, folder, path, kinds[path.suffix])
    typer.echo(f"{written} pairs in {path}")
