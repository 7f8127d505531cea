"""Every recipe is planned for the GPUs it names, and rehearsed on the tiny pipeline of its family.

By default one recipe of each checkpoint is planned and one of each family rehearsed; the others are
slow: rehearsing all 24 took 91 s of CPU on two busy cores.
"""

import json
import re
from pathlib import Path

import pytest

from flowrl.actions import align
from flowrl.config import load_config
from flowrl.dry_run import FAMILIES, dry
from flowrl.plan import make_plan, memory_class
from flowrl.recipe import preset_folder, preset_names

REAL = [name for name in preset_names() if re.search(r"-\d+gb$", name)]
PLANNED = {  # a checkpoint each
    "sd3.5-medium-grpo-fast-24gb",
    "sd3.5-large-grpo-fast-48gb",
    "flux.1-dev-nft-24gb",
    "sana-1.6b-grpo-fast-24gb",
}
REHEARSED = {  # a family each
    "sd3.5-large-grpo-fast-48gb",
    "flux.1-dev-grpo-fast-80gb",
    "sana-1.6b-grpo-fast-24gb",
}


def some(names: list[str], default: set[str]) -> list:
    """Parameters of which those that are not default are slow."""
    assert default <= set(names)
    return [pytest.param(n, marks=() if n in default else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", some(REAL, PLANNED))
def test_a_recipe_fits_the_gpus_it_is_for_and_none_of_them_waits(name):
    config = load_config(name)
    head = (preset_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    (gpus,) = re.findall(r"^# Hardware: (\d) GPU", head, re.MULTILINE)
    plan = make_plan(config, gpus=int(gpus), memory=memory_class(name))
    assert plan.phases and plan.geometry.even
    assert plan.memory is not None and plan.peak is not None
    # A driver, other programs and fragments want the rest.
    assert plan.peak.total <= 0.95 * plan.memory, plan.peak
    if config.objective.kind == "grpo":  # a smaller last batch would round otherwise
        shares = plan.geometry.shares
        assert not {rows % config.optim.micro_batch for s in shares for rows in s.rows} - {0}


@pytest.mark.parametrize("name", some(preset_names(), REHEARSED))
def test_a_recipe_runs_on_the_tiny_pipeline_of_its_family(name, tmp_path):
    real = load_config(name)
    config = dry(real, tmp_path)
    assert config.pipeline.path == FAMILIES[real.pipeline.backbone]
    for kept in ("objective", "rollout.tree", "rollout.kernel", "rollout.noise_level"):
        assert part(config, kept) == part(real, kept)
    align(config)
    lines = (Path(config.run.output_dir) / "metrics.jsonl").read_text().splitlines()
    moved = [row["grad/norm"] for row in map(json.loads, lines) if "grad/norm" in row]
    assert len(moved) == config.run.iterations and all(norm > 0 for norm in moved)


def part(config, key: str):
    for name in key.split("."):
        config = getattr(config, name)
    return config
