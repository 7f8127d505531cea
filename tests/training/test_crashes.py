"""A run that was killed at any file operation and resumed ends as one that nothing happened to."""

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import diffusers
import pytest
import torch
from crashes import SMALLEST, fork, kill_at

from flowrl.api import align, collect
from flowrl.assembly.learner import ProvidedObjects, with_pipeline_name
from flowrl.assembly.start import recipe_facts
from flowrl.backbones.small import small_folder
from flowrl.functional.contrasts import Contrast
from flowrl.training import owner
from flowrl.training.checkpoint import STATE
from flowrl.training.resume import AUTO, decide
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import load_state

PLAIN = SMALLEST | {"batch_size": 4}
ODE = PLAIN | {"tree": {"kind": "ode"}}
TREE = {"kind": "tree_grpo", "branch": 2, "window": {"kind": "fixed", "size": 1}}
EXPLORE = {
    "candidates": 4,
    "num_inference_steps": 2,
    "precision": "bf16",
    "audit": {"every": 1},
}
EVALUATION = {"prompts": "tiny:colors:test", "num_images": 2, "num_inference_steps": 1, "every": 1}
GDRO = {"kind": "gdro", "noising": {"count": 1}}
NFT = {"kind": "nft", "noising": {"count": 1}}
KINDS = {
    "grpo": {
        "rollout": PLAIN,
        "objective": {"kind": "grpo", "kl_coef": 0.1},
        "reference": {"every": 1},
        "ema": {"decay": 0.5},
        "evaluation": EVALUATION,
    },
    "tree": {
        "rollout": PLAIN | {"num_inference_steps": 3, "tree": TREE},
        "prompts": {"book": {"success": 0.9}},
    },
    "refiner": {"rollout": PLAIN, "prompts": {"refiner": {"own_words": 1}}},
    "nft": {"rollout": ODE, "objective": NFT | {"old_decay": {"rate": 0.2, "limit": 0.6}}},
    "stored": {"rollout": ODE, "objective": GDRO},
    "two-stage": {"rollout": ODE | {"explore": EXPLORE}, "objective": NFT},
    "gradient": {
        "rollout": ODE,
        "objective": {"kind": "refl"},
        "rewards": [{"name": "tiny_colors"}],
    },
    "collect": {"rollout": ODE, "objective": {"kind": "sft"}},
}
ITERATIONS = 2
GROUPS = 2  # of a data set
PICTURE = b"a picture"


@dataclass
class Drill:
    """One kind of state: what is done in a folder, and what an undisturbed end looks like."""

    kind: str
    config_for: Callable
    load_tiny: Callable
    folder: Path

    def work(self, folder: Path) -> None:
        config = self.config_for(folder)
        if self.kind == "collect":
            collect(config, folder, groups=GROUPS, pipeline=self.load_tiny())
        else:
            align(config, pipeline=self.load_tiny())

    def go_on(self, folder: Path, whole: dict) -> int:
        """Do the work again; return 0 when it ends as it should."""
        os.fsync = lambda handle: None  # no power cut here, and disks are slow
        self.work(folder)
        found = ending(folder)
        wrong = [name for name in {**whole, **found} if whole.get(name) != found.get(name)]
        if self.kind != "collect" and not wrong:
            config = with_pipeline_name(self.config_for(folder), self.load_tiny())
            facts = recipe_facts(config, ProvidedObjects())
            start = decide(config, facts, resume=AUTO, accept_changes=False)
            wrong += [] if start.finished else ["it is not finished"]
        if wrong:
            print(f"{self.kind}, {folder.name}: {wrong}", file=sys.stderr)
        return 1 if wrong else 0


def ending(folder: Path) -> dict:
    """What the end of a run is judged by, bit for bit; leftovers too."""
    found: dict = {}
    # A process that is killed at its very end leaves its name behind, which readers see through.
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != owner.FILE):
        name = str(path.relative_to(folder))
        if path.name == STATE:
            state = load_state(path)
            numbers = digest_of([state.get(part) for part in ("policy", "optimizer", "refiner")])
            found[name] = json.dumps(
                [state["iteration"], state["best"], state.get("book"), numbers]
            )
        elif path.suffix in (".tmp", ".safetensors", ".json") or (
            name.startswith(("stores/", "data/")) and not path.name.startswith(".lock")
        ):
            found[name] = path.read_bytes()
        elif name == "README.md":
            found[name] = True
    found["metrics"] = [
        {k: v for k, v in line.items() if not k.startswith("time/")}
        for line in read_metrics(folder)
    ]
    return found


def digest_of(value) -> list:
    """The sums of the tensors of a nested state, in order."""
    if isinstance(value, torch.Tensor):
        return [value.double().sum().item()]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [number for item in items for number in digest_of(item)]


@pytest.fixture
def drill(tiny_config, load_tiny, monkeypatch):
    """Makes the drill of a kind in a folder in memory, where that is, and its undisturbed end."""
    monkeypatch.setattr("flowrl.export.model_card.png", lambda *_: PICTURE)
    monkeypatch.setattr("flowrl.export.gallery.draw_grid", lambda *_, **__: PICTURE)
    same = Contrast(mean=0.0, low=0.0, high=0.0, p=1.0, images=1, prompts=1)
    monkeypatch.setattr("flowrl.training.evaluate.paired_contrast", lambda *_: same)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="flowrl-crashes-", dir=memory))
    prompts = folder / "prompts.txt"
    prompts.write_text("a red circle\na blue square\na green star\n")  # few are read soon

    def make(kind: str) -> tuple[Drill, dict]:
        source = {"train": str(prompts)} | KINDS[kind].get("prompts", {})
        changes = KINDS[kind] | {"prompts": source}
        changes["lora"] = {"rank": 4, "alpha": 6, "targets": ["attn.to_q"]}  # few layers: soon made
        if kind == "stored":
            path = folder / kind / "store"
            changes["rollout"] = changes["rollout"] | {"store": str(path)}
            plain = tiny_config(
                rollout=ODE, objective={"kind": "sft"}, prompts={"train": str(prompts)}
            )
            collect(plain, path, groups=GROUPS, pipeline=load_tiny())

        def config_for(place: Path):
            run = {"iterations": ITERATIONS, "output_dir": str(place), "keep_checkpoints": 1}
            return tiny_config(**changes | {"run": run})

        made = Drill(kind=kind, config_for=config_for, load_tiny=load_tiny, folder=folder / kind)
        whole = made.folder / "whole" / "run"
        made.work(whole)  # in this process, which is warm then
        return made, ending(whole)

    try:
        yield make
    finally:
        shutil.rmtree(folder)


# Which of its file operations a process does not come to.
SAMPLE = {"grpo": 130, "collect": 30}
KILLS = 25


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_killed_process_leaves_a_run_that_ends_as_if_nothing_had_happened(drill, kind):
    made, whole = drill(kind)
    folder = made.folder / "killed" / "run"
    assert kill_at(SAMPLE[kind], folder, lambda: made.work(folder))
    assert fork(lambda: made.go_on(folder, whole)) == 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_again_and_again_ends_as_if_nothing_had_happened(drill, kind):
    made, whole = drill(kind)
    choice, killed = random.Random(kind), 0
    for attempt in range(KILLS):
        folder = made.folder / f"killed-{attempt}" / "run"
        for _ in range(2):  # a run that was killed, and the one that resumes it
            operation = choice.randrange(120)
            killed += kill_at(operation, folder, lambda folder=folder: made.work(folder))
        assert fork(lambda folder=folder: made.go_on(folder, whole)) == 0, attempt
        shutil.rmtree(folder)
    assert killed >= KILLS / 2


CLASSES = ("Flux2KleinPipeline", "QwenImagePipeline", "ZImagePipeline", "Krea2Pipeline")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CLASSES)
def test_a_killed_run_of_a_pipeline_class_ends_with_equal_bits(name, tiny_config, tmp_path):
    base = small_folder(getattr(diffusers, name), tmp_path / "base")
    sizes = {"path": str(base), "max_sequence_length": 64, "height": 64, "width": 64}
    nft = {"rollout": {"tree": {"kind": "ode"}}, "objective": {"kind": "nft"}}

    def train(folder: Path) -> None:
        run = {"iterations": 4, "output_dir": str(folder)}
        align(tiny_config(**nft, pipeline=sizes, run=run))

    train(tmp_path / "whole")
    # 70: a file operation after some iteration.
    assert kill_at(70, tmp_path / "killed", lambda: train(tmp_path / "killed"))
    done = len(read_metrics(tmp_path / "killed"))
    assert 0 < done < 4
    assert fork(lambda: train(tmp_path / "killed") or 0) == 0
    whole, killed = ending(tmp_path / "whole"), ending(tmp_path / "killed")
    assert [name for name in whole if killed.get(name) != whole[name]] == []
