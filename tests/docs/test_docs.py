"""The pages under docs/: commands work as they stand there, tables and options are the code's."""

import json
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from PIL import Image

from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.cli import main
from flowrl.config import Config, load_config, parse_config
from flowrl.config.arguments import sort_arguments
from flowrl.config.load import preset_folder, preset_names
from flowrl.config.messages import walk
from flowrl.config.objectives import Objective
from flowrl.config.sections import MemoryOptions
from flowrl.errors import UserError
from flowrl.scoring.spec import BUILT_IN
from flowrl.utils.distributed import Runtime

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def commands(page: str, *names: str) -> list[list[str]]:
    """Words of the page's commands after `flowrl`, or after the script that a launcher starts."""
    lines = [
        shlex.split(line, comments=True)
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if "flowrl" in line or "scripts/train_sd3.py" in line
    ]
    starts = ("flowrl", "scripts/train_sd3.py")
    found = [words[next(i for i, w in enumerate(words) if w in starts) :] for words in lines]
    found = [words[1:] if words[0] == "flowrl" else ["train", *words[1:]] for words in found]
    return [words for words in found if not names or words[0] in names]


def test_every_key_on_a_page_is_an_option_and_links_lead_somewhere():
    keys = {option.path for option in walk(Config)}
    tops = {key.partition(".")[0] for key in keys}
    pages = {"objectives": 8, "recipes": 8, "rewards": 4, "sol-rl": 12, "memory": 4}
    for page, least in pages.items():
        words = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", PAGES[page]))
        files = (".md", ".py", ".jsonl")
        named = {w for w in words if w.partition(".")[0] in tops and not w.endswith(files)}
        assert len(named) >= least and named <= keys, page
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (DOCS / target).exists(), (page, target)


# --- export.md ----------------------------------------------------------------------------------


def test_every_export_reaches_its_format_with_its_place(monkeypatch):
    seen = []
    formats = ["diffusers", "comfyui", "merged", "hub"]
    for name in formats:
        record = lambda source, *to, name=name, **how: seen.append((name, *to, how))  # noqa: E731
        monkeypatch.setattr(f"flowrl.export.formats.export_{name}", record)
    for words in commands("export", "export"):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code
    assert [call[0] for call in seen] == formats
    assert re.findall(r"^\| `(\w+)` \|", PAGES["export"], re.MULTILINE) == formats
    assert [call[1].name for call in seen[:3]] == ["lora", "quickstart.safetensors", "merged"]
    assert seen[3][-1] == {"repository": "me/quickstart", "private": False}
    (words,) = commands("export", "train")
    request = sort_arguments(words[1:])
    run = load_config(request.recipe, request.overrides).run
    assert run.push_to_hub and run.hub_model_id == "me/quickstart"


# --- judges.md, rewards.md ----------------------------------------------------------------------


def test_rewards_recipes_and_executors_of_the_page_are_valid():
    page = PAGES["rewards"]
    rows = [line.split("|")[1] for line in page.split("```")[0].splitlines() if line[:3] == "| `"]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(BUILT_IN)
    for text in blocks("rewards", "yaml"):
        section = yaml.safe_load(text)
        config = parse_config({"prompts": {"train": "tiny:all:train"}} | section)
        assert len(config.rewards) == len(section["rewards"])
    executors = re.findall(r"^\| `(\{kind: [^`]*\})` \|", page, re.MULTILINE)
    assert len(executors) == 5
    for text in executors:
        how = yaml.safe_load(text.replace("[...]", "['http://127.0.0.1:8400']"))
        rewards = [{"name": "ocr", "executor": how}]
        config = parse_config({"prompts": {"train": "tiny:ocr:train"}, "rewards": rewards})
        assert config.rewards[0].executor.kind == how["kind"]


# --- memory.md, objectives.md, recipes.md -------------------------------------------------------


def test_every_option_of_memory_is_told_and_the_extras_exist():
    told = set(re.findall(r"`memory\.(\w+)[=`]", PAGES["memory"])) | {"base_library"}
    assert told == set(MemoryOptions.model_fields)
    extras = re.findall(r"pip install \"\.\[(\w+)\]", PAGES["memory"])
    text = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert len(extras) == 2 and all(f"\n{extra} = [" in text for extra in extras)


def test_every_kind_of_objective_is_in_the_table():
    kinds = {section.model_fields["kind"].default for section in get_args(get_args(Objective)[0])}
    rows = [line.split("|")[1] for line in PAGES["objectives"].splitlines() if line[:3] == "| `"]
    assert {kind for row in rows for kind in re.findall(r"`(\w+)`", row)} == kinds


def test_every_recipe_has_a_row_and_the_row_is_what_it_says():
    page = PAGES["recipes"]
    names = re.findall(r"^\| `((?:quickstart|[\w.]+-)[\w.-]*)`", page, re.MULTILINE)
    assert sorted(names) == preset_names()
    for name in names:
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \| (.*) \|$", page, re.MULTILINE)
        learns, rewards, *rest = row.split(" | ")
        config = load_config(name)
        assert learns.startswith(f"`{config.objective.kind}`"), name
        assert ("24 of 96" in learns) == (config.rollout.explore is not None), name
        assert ("trees" in learns) == config.rollout.tree.kind.startswith("branch"), name
        trained = {f"`{reward.name}`": 0 for reward in config.rewards if not reward.held_out}
        assert rewards == ", ".join(trained), name
        if rest:
            hardware, source = rest
            text = re.sub(r"\s+#?\s*", " ", (preset_folder() / f"{name}.yaml").read_text())
            gpus, memory = hardware.removesuffix(" GB").split(" x ")
            assert f"Hardware: {gpus} GPU{'s' * (gpus != '1')} of {memory} GB" in text, name
            assert f"arXiv {source.rpartition(' ')[2]}" in text, name


# --- stores.md ----------------------------------------------------------------------------------


def test_pairs_of_the_page_are_collected_and_learned_from(
    tmp_path, monkeypatch, tiny_pipeline_path, load_tiny
):
    training, collecting = commands("stores", "train"), commands("stores", "collect")
    assert len(training) == len(collecting) == 2
    made = [words[words.index("-o") + 1] for words in collecting]
    for words in training:
        request = sort_arguments(words[1:])
        store = load_config(request.recipe, request.overrides).rollout.store
        assert store is not None and store.path in made
    monkeypatch.chdir(tmp_path)
    (row,) = re.findall(r"```json\n(.*)\n```", PAGES["stores"])
    for name, color in zip(("chosen", "rejected"), ("red", "blue"), strict=True):
        Image.new("RGB", (64, 64), color).save(json.loads(row)[name])
    Path("pairs.jsonl").write_text(row + "\n")
    own = [f"pipeline.path={tiny_pipeline_path}", "pipeline.device=cpu"]
    with pytest.raises(SystemExit) as end:
        main([*next(words for words in collecting if "--pairs" in words), *own])
    assert not end.value.code
    request = sort_arguments(next(w[1:] for w in training if any("pairs" in x for x in w)))
    config = load_config(request.recipe, [*request.overrides, *own])
    given = ProvidedObjects(pipeline=load_tiny())
    learner = build_learner(config, Runtime(device="cpu"), given)
    before = [p.detach().clone() for p in learner.policy.parameters()]
    rollout, metrics = learner.iterate(0)
    assert set(rollout.prompts) == {"a red star"} and metrics["grad/norm"] > 0
    assert not all(map(torch.equal, learner.policy.parameters(), before))
    rule = ["run.stop_when_hacking={held_out: geneval_strict}", "evaluation.every=5"]
    config = load_config(request.recipe, [*request.overrides, *own, *rule])
    with pytest.raises(UserError, match="run.stop_when_hacking"):
        build_learner(config, Runtime(device="cpu"), given)
