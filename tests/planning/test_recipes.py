"""The recipes for checkpoints: their heads say what they are, their numbers belong together, they
fit the GPUs they name, and their loops run on the tiny pipelines of their families."""

import functools
import json
import math
import re
import shlex
from functools import reduce
from pathlib import Path

import pytest

from flowrl.api import align
from flowrl.backbones.families import family_of
from flowrl.config import Config
from flowrl.config import load_config as load
from flowrl.config.arguments import sort_arguments
from flowrl.config.load import preset_folder, preset_names
from flowrl.config.objectives import DistillOptions
from flowrl.planning.dry_run import rehearse
from flowrl.planning.model_specs import MODEL_SPECS, pipeline_class, spec_name
from flowrl.planning.plan import make_plan, memory_class

FILES = sorted(preset_folder().glob("[!_]*.yaml"))
REAL = [path.stem for path in FILES if re.search(r"-\d+gb$", path.stem)]
UNGUIDED = ("nft", "solrl")


load_config = functools.cache(lambda name, changes=(): load(name, list(changes)))


def head(name: str) -> str:
    (text,) = re.findall(r"\A((?:#.*\n)+)", (preset_folder() / f"{name}.yaml").read_text())
    return re.sub(r"^# ?", "", text, flags=re.MULTILINE)


def commands(name: str) -> list[list[str]]:
    lines = re.findall(r"^  +(.*)$", head(name).replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def kind(config: Config) -> str:
    if config.rollout.explore is not None:
        return "solrl"
    tree, objective = config.rollout.tree.kind, config.objective.kind
    return {"flow_grpo": "grpo", "flow_grpo_fast": "grpo-fast", "branch_grpo": "branchgrpo"}.get(
        tree, objective
    )


def test_the_head_of_a_recipe_tells_what_it_is_and_how_to_run_it():
    for name in REAL:
        config = load_config(name)
        ((gpus, memory),) = re.findall(r"^Hardware: (1 GPU|8 GPUs) of (\d+) GB", head(name), re.M)
        assert name == f"{spec_name(config.pipeline.path)}-{kind(config)}-{memory}gb"
        assert any(words[0] == "accelerate" for words in commands(name)) == (gpus == "8 GPUs")
    for name in [path.stem for path in FILES]:
        module = ["accelerate", "launch", "--num_processes", "8", "-m", "flowrl", "train"]
        starts = (["flowrl", "train"], module)
        (words,) = [
            words[len(start) :]
            for words in commands(name)
            for start in starts
            if words[: len(start)] == start and "--encode-only" not in words
        ]
        request = sort_arguments(words)
        assert request.recipe == name and load_config(name, tuple(request.overrides))
    for name in REAL:
        for words in commands(name):
            if {"collect", "audit", "--encode-only"} & set(words):
                assert name in words
                changes = [word for word in words if re.match(r"[a-z.]+\w+=", word)]
                assert load_config(name, tuple(changes))
            if words[:2] == ["flowrl", "prompts"]:
                folder = words[words.index("-o") + 1]
                assert load_config(name).prompts.train == f"{folder}/train.jsonl"
                assert load_config(name).evaluation.prompts == f"{folder}/test.jsonl"


def test_settings_of_a_recipe_fit_its_objective():
    # A recipe that compares likelihoods has one batch shape. Half-precision networks round
    # otherwise at another, and the ratio's tolerance is small.
    for name in REAL:
        config = load_config(name)
        if config.objective.kind == "grpo":
            assert config.pipeline.dtype != "fp32"
            assert config.rollout.batch_size == config.optim.micro_batch
    # Forward processes are published without guidance. DiffusionNFT (2509.16117) and Sol-RL
    # (2604.06916), which feeds 1 to FLUX's input too.
    for name in [name for name in REAL if kind(load_config(name)) in UNGUIDED]:
        config = load_config(name)
        size = spec_name(config.pipeline.path)
        off = family_of(MODEL_SPECS[str(size)].pipeline).unguided
        off = 1.0 if off is None else off
        assert config.rollout.guidance_scale == config.evaluation.guidance_scale == off
        assert config.rollout.training_guidance_scale in (None, off)
    for name in [name for name in REAL if "-fast" not in name]:
        config = load_config(name)
        if config.objective.kind != "grpo":
            continue
        height, size = config.pipeline.height, spec_name(config.pipeline.path)
        assert size is not None and height is not None and height == config.pipeline.width
        elements = math.prod(MODEL_SPECS[size].latent_shape(height))
        assert config.objective.clip_nats == pytest.approx(1e-4 * elements, rel=0.01)


PLANNED = [name for name in REAL if re.search(r"medium-grpo-24", name)]
OTHERS = [name for name in REAL if name not in PLANNED]


@pytest.mark.parametrize(
    "names", [PLANNED, pytest.param(OTHERS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_recipe_fits_the_gpus_it_is_for_and_none_of_them_waits(names):
    for name in names:
        config = load(name)
        (gpus,) = re.findall(r"^Hardware: (\d) GPU", head(name), re.MULTILINE)
        plan = make_plan(config, gpus=int(gpus), memory=memory_class(name))
        assert plan.phases and plan.geometry.even
        assert plan.memory is not None and plan.peak is not None
        # A driver, other programs and fragments want the rest: of a small card a gigabyte.
        assert plan.peak.total <= min(0.95 * plan.memory, plan.memory - 1.0e9), plan.peak


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_recipe_runs_on_the_tiny_pipeline_of_its_family(tmp_path):
    for name in preset_names():
        real = load(name)
        rehearsal = rehearse(real, tmp_path / name)
        config = rehearsal.config
        kind = pipeline_class(real.pipeline.path)
        assert pipeline_class(config.pipeline.path) == kind
        for key in ("objective", "rollout.tree", "rollout.kernel", "rollout.noise_level"):
            small, wanted = (reduce(getattr, key.split("."), made) for made in (config, real))
            if isinstance(wanted, DistillOptions):  # whose LoRAs fit the real network alone
                for i, teacher in enumerate(wanted.teachers):
                    listed = rehearsal.replaced[f"objective.teachers.{i}.lora"]
                    assert listed == (teacher.lora, None)
                wanted = wanted.model_copy(update={"teachers": small.teachers})
            assert small == wanted, key
        align(config)
        lines = (Path(config.run.output_dir) / "metrics.jsonl").read_text().splitlines()
        moved = [row["grad/norm"] for row in map(json.loads, lines) if "grad/norm" in row]
        assert len(moved) == config.run.iterations
        # Stand-ins for teachers are the base, and so is a student that has learned nothing.
        assert all((norm > 0) == (real.objective.kind != "distill") for norm in moved)
