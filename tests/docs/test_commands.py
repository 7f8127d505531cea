"""Every fenced command of README, CONTRIBUTING and docs: run in order, in a folder like a reader's.

What a reader has is made first: the README's first run, the files that pages speak of, and images.
Trainings are shortened by options that come after what is printed, so that collisions of folders
show as they would; recipes of cards run as --dry-run. Tutorials: test_tutorials.py.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from PIL import Image

from flowrl.cli import app, main
from flowrl.config import load_config
from flowrl.config.arguments import sort_arguments
from flowrl.voting.ballot import Ballot, Vote

ROOT = Path(__file__).parents[2]
PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    if path != ROOT / "docs" / "README.md"
}
ELSEWHERE = {  # how a command begins that is not run here, and what it needs
    "pip install": "an installation: tests/test_package.py has one",
    "uv ": "an account of the package index",
    "docker": "a Docker engine",
    "FLOWRL_REPOSITORY=": "the site: tests/docs/test_site.py builds it",
    "judge/bin/pip": "vLLM",
    "pyright": "the developer's tools, which .ci/run runs",
    "ruff check": "the developer's tools, which .ci/run runs",
    "pytest": "the tests, these among them",
    "flowrl benchmark geneval": "weights of a detector",
    "flowrl train flux.1-dev-nft-12gb --encode-only": "weights of text encoders",
    "flowrl train quickstart run.push_to_hub": "an account",
    "flowrl export runs/quickstart --to hub": "an account",
    "export HF_TOKEN": "an account",
    "python -m scripts.bench iteration --json": "CUDA: networks of real size",
    "python -m scripts.bench iteration --size flux.1-dev": "CUDA: a network of real size",
    "python -m scripts.bench iteration --size sd3.5-large": "CUDA: a network of real size",
    "python -m scripts.bench two-stage --size": "CUDA: networks of real size",
    "python -m scripts.bench iteration --size sana-1.6b": "minutes of the bench",
    "python -m scripts.bench two-stage --precision": "minutes of the bench",
    "python -m scripts.pipelines": "many networks, one after the other",
    "python scripts/gradient_signal.py": "tests/scripts",
    "python -m venv judge": "vLLM",
    "judge/bin/vllm": "vLLM and a GPU",
    "torchrun": "several GPUs",
    "accelerate launch": "several GPUs",
    "python scripts/two_gpus.py": "two GPUs",
    "python -m scripts.arena": "hours",
    "python -m scripts.compare": "hours",
    "python -m scripts.pretrain_tiny": "hours",
    "ray start": "several machines",
    "ray job": "several machines",
    "flowrl reward-check ocr geneval": "weights",
}  # fmt: skip
STAND_INS = {  # names of what cannot be here -> what is
    "OWNER/NAME": "runs/quickstart",
    "runs/a": "runs/quickstart",
    "benchmark drawbench": "benchmark prompts.txt",
    "--reward clipscore": "--reward brightness",
    "--reward pickscore --server http://127.0.0.1:8400": "--reward brightness",
    "--reward ocr --prompt": "--reward brightness --prompt",
    "reward-serve ocr geneval": "reward-serve brightness",
    "reward-serve ocr --args '{mode: strict}'": "reward-serve tiny_quality",
    "reward-serve hpsv3": "reward-serve brightness",
    "--host rewards.example.com --token-env REWARD_TOKEN": "",
    "address: auto": "address: null",
    "count: 8": "count: 1",
    "reward-check --all": "reward-check brightness",
    "--groups 512": "--groups 6",
    "--groups 300": "--groups 6",
    "--groups 64": "--groups 6",
}
SHORT = ["run.iterations=2", "evaluation.num_images=6", "rollout.prompts_per_iteration=4"]
QUICK = ("flowrl explain", "flowrl tree", "flowrl prompts")
DOES_NOT_FIT = "flowrl plan flux.1-dev-grpo-80gb --memory 48GB"  # and says so by its exit code
SERVERS = ("flowrl ui", "flowrl vote", "flowrl reward-serve")
UNTIL = re.compile(r"//127\.0\.0\.1:\d+")  # what a server prints when it listens


def commands(page: str) -> list[str]:
    """Return the commands of a page's fences as a shell has them, in order."""
    found = []
    for block in re.findall(r"^ *```bash\n(.*?)```", PAGES[page], re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            bare = re.split(r"(?:^|\s)# ", line)[0]
            found += [" ".join(part.split()) for part in bare.split(" && ") if part.strip()]
    return found


def needs(command: str) -> str | None:
    """Return what a command needs that is not here, None where it runs."""
    return next((why for start, why in ELSEWHERE.items() if command.startswith(start)), None)


def parsed(words: list[str]) -> dict:
    """Return the arguments of a command, as typer reads them."""
    group = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), words[0])
    assert command is not None, words
    return command.make_context(words[0], words[1:]).params


def words_of(command: str) -> list[str]:
    """Return the words after `flowrl` as they are run: with stand-ins, and short."""
    for name, here in STAND_INS.items():
        command = command.replace(name, here)
    words = shlex.split(command)[1:]
    if words[0] == "train" and "--print-config" not in words and "--dry-run" not in words:
        recipe = sort_arguments(parsed(words)["words"]).recipe
        card = not load_config(recipe).pipeline.path.startswith("tiny-")
        words += ["--dry-run"] if card else [*SHORT, "pipeline.device=cpu"]
        words = [word for word in words if word not in ("--gpus", "auto", "8")] if card else words
    elif words[0] == "plan":  # for a machine of a reader who trains such a recipe
        words += ["--host-memory", "2000GB"]
    elif words[0] in ("evaluate", "audit", "collect", "vote"):
        words += ["pipeline.device=cpu", "evaluation.num_images=6"]
    return words


def run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert (end.value.code or 0) == code, words


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the files that pages speak of as the reader's own."""
    folder = tmp_path_factory.mktemp("reader")
    texts = ("a red circle", "a blue square", "two rings", "a star", "a green cross", "a ring")
    texts += ("a small star", "two crosses")  # of eight, four are held out
    (folder / "prompts.txt").write_text("\n".join(texts) + "\n")
    shutil.copy(folder / "prompts.txt", folder / "my_prompts.txt")
    for file, name in (("my_rewards", "reward"), ("my_objectives", "objective")):
        text = re.search(rf"```python {name}\n(.*?)```", PAGES["CONTRIBUTING"], re.DOTALL)
        assert text is not None
        (folder / f"{file}.py").write_text(text[1])
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    mine = (folder / "my_rewards.py").read_text().replace("def sharpness", "def Sharpness")
    (folder / "my_package" / "mine.py").write_text(mine.replace("sharpness.f", "Sharpness.f"))
    row = {"prompt": "a red star", "chosen": "good.png", "rejected": "bad.png"}
    (folder / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    for name, color in (("good", "red"), ("bad", "blue"), ("samples/a", "white")):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 64), color).save(folder / f"{name}.png")
    row = {"tag": "single_object", "include": [{"class": "circle", "count": 1}]}
    row["prompt"] = "a photo of a circle"
    (folder / "evaluation_metadata.jsonl").write_text(json.dumps(row) + "\n")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


@pytest.fixture
def reader(written, tmp_path, monkeypatch):
    """The working directory: a copy of that folder."""
    folder = shutil.copytree(written, tmp_path / "reader")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    for name in ("my_rewards", "my_objectives", "my_package", "my_package.mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


# --- quick ---------------------------------------------------------------------------------------


def test_what_is_not_run_is_on_a_page_and_so_is_what_stands_in():
    told = [command for page in PAGES for command in commands(page)]
    assert len(told) > 100
    for start in ELSEWHERE:
        assert any(command.startswith(start) for command in told), start
    for name in STAND_INS:
        assert any(name in command for command in told), name


def test_every_training_and_plan_of_a_page_is_a_valid_recipe():
    """Also of those that want several GPUs or machines, without their launcher."""
    checked = 0
    for page in PAGES:
        for command in commands(page):
            found = re.search(r"(?:flowrl |scripts/)(train|plan)(?:_\w+\.py)? (.*)", command)
            if found is not None and not command.startswith("ray"):
                request = sort_arguments(parsed([found[1], *shlex.split(found[2])])["words"])
                assert load_config(request.recipe, request.overrides), command
                checked += 1
    assert checked > 30


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(c.startswith(QUICK) for c in commands(page))]
)
def test_quick_commands_of_a_page_run(page, reader):
    for command in commands(page):
        if command.startswith(QUICK) and needs(command) is None:
            run(words_of(command))


# --- slow ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started(written):
    """The folder after the README's first command, and the tutorial's: two runs lie in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(written)
        for name in ("quickstart", "quickstart-sana"):
            run(words_of(f"flowrl train {name}"))
    return written


def listens(command: str) -> None:
    """Start a server as its own process, wait for its address, and end it."""
    words = [sys.executable, "-m", "flowrl", *words_of(command)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.getcwd()}"}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(line)
        if UNTIL.search(line):
            break
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    process.wait(60)
    assert told and UNTIL.search(told[-1]), "".join(told)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", list(PAGES))
def test_commands_of_a_page_run_in_order(page, started, reader):
    for command in commands(page):
        print(f"$ {command}", flush=True)
        if needs(command) is not None:
            continue
        if command.startswith(SERVERS) and "--train" not in command:
            listens(command)
            continue
        if command == "flowrl vote quickstart-vote --train":
            vote_twice(reader / "votes")
        run(words_of(command), int(command == DOES_NOT_FIT))


def vote_twice(folder: Path) -> None:
    """Vote as a reader would have between the page's two commands."""
    for prompt in sorted(folder.glob("0*"))[:2]:
        names = [f"{prompt.name}/samples/000{k}.png" for k in (0, 1)]
        Ballot(folder).cast(
            Vote(prompt=prompt.name, first=names[0], second=names[1], choice="first")
        )
