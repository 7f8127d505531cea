"""`flowrl vote`: choose between images, and train a LoRA on your choices."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.cli._console import Lora, say, starting
from flowrl.cli.train import Words, print_what_next, recipe_request
from flowrl.cli.ui import Host, Port, TokenVariable, page_token, serve_page
from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.config import Config


def vote(  # noqa: PLR0913  # an argument for each option
    words: Words = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Folder of images and votes.")
    ] = Path("votes"),
    lora: Lora = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts to draw images of.")] = 60,
    per_prompt: Annotated[int, typer.Option(min=2, help="Images of each prompt.")] = 8,
    goal: Annotated[int, typer.Option(min=1, help="Number of votes that the page counts to.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the images and of the order.")] = 0,
    train: Annotated[
        bool, typer.Option("--train", help="Train on the votes so far; open no page.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write the votes as pairs of images."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8402,
    token_env: TokenVariable = None,
) -> None:
    """Choose between two images, again and again, in the browser; then train a LoRA on your votes.

    Keys: 1, 2, t (tie), s (skip), u (undo). Each vote is saved at once: stop with Ctrl-C, and
    continue with the same command. A run in place of the recipe draws with its LoRA; a folder of
    images shows these. --train runs DPO on the votes, or KTO with objective.kind=kto.

    Examples:

      flowrl vote quickstart-vote

      flowrl vote quickstart-vote --train

      flowrl vote runs/quickstart-sana -o votes/aligned

      flowrl vote votes --export votes.jsonl
    """
    words, images, lora = _target(words or [], lora)
    folder = images or output_dir
    if export is not None:
        from flowrl.voting.ballot import Ballot, write_pairs

        written = write_pairs(Ballot(folder).votes, folder, export)
        say(f"{written} pairs in {export}")
        return
    if train:
        with starting():
            from flowrl.voting.learn import learn_from_votes, train_on_votes

        config = _config(words)
        learned = learn_from_votes(folder)
        say(f"{learned.file} predicts {learned.accuracy:.0%} of votes that it did not see.")
        trained = train_on_votes(config, folder, lora=lora, learned=learned)
        print_what_next(config, trained)
        return
    with starting():
        from flowrl.backbones.offload import free_device_memory
        from flowrl.utils.files import locked_folder
        from flowrl.voting.app import Questions, make_app
        from flowrl.voting.ballot import Ballot
        from flowrl.voting.candidates import read_candidates
        from flowrl.voting.learn import draw_candidates

    with locked_folder(folder, "images", "votes"):
        if images is None:
            draw_candidates(
                _config(words), folder, prompts=prompts, per_prompt=per_prompt, lora=lora, seed=seed
            )
        questions = Questions(read_candidates(folder), Ballot(folder), goal=goal, seed=seed)
        token = page_token(host, token_env)
        train_words = ["vote", *words, "--train", "--output-dir", str(folder)]
        train_words += ["--lora", lora] if lora else []
        app = make_app(questions, token=token, host=host, train=train_words if words else ())
        free_device_memory()  # a run that the page starts may need it
        serve_page(app, f"Images of the folder {os.fspath(folder)}", host, port, token)
        if any(row["exit"] is None for row in app.state.jobs.rows()):
            say(f"Training on the votes continues in {folder}.")


def _target(words: list[str], lora: str | None) -> tuple[list[str], Path | None, str | None]:
    """Return words, images and LoRA, from a first word that names a folder.

    A run stands for its recipe and its LoRA; another folder has images, or images and votes. The
    name of a preset is the preset, whatever folder has that name.
    """
    from flowrl.config.load import preset_names

    folder = Path(words[0]) if words else None
    if folder is None or words[0] in preset_names() or not folder.is_dir():
        return words, None, lora
    recipe = folder / "config.yaml"
    if recipe.is_file():
        return [str(recipe), *words[1:]], None, lora or str(folder)
    return words[1:], folder, lora


def _config(words: list[str]) -> "Config":
    from flowrl.config import load_config

    request = recipe_request(words, "flowrl vote quickstart-sana")
    if any(change.startswith("run.output_dir=") for change in request.overrides):
        raise UserError(
            "leave run.output_dir out: the run is saved beside the images, in the folder of -o"
        )
    return load_config(request.recipe, request.overrides)
