"""Every recipe for a real checkpoint is planned for the GPUs it names, and fits them."""

import re

import pytest

from flowrl.config import load_config
from flowrl.config.load import preset_folder, preset_names
from flowrl.planning.plan import make_plan, memory_class

REAL = [name for name in preset_names() if re.search(r"-\d+gb$", name)]
QUICK = [name for name in REAL if re.search(r"medium-grpo-24", name)]
SMALL = [name for name in REAL if re.search(r"-(12|16)gb$", name)]
SLOW = [name for name in REAL if name not in QUICK]


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_recipe_fits_the_gpus_it_is_for_and_none_of_them_waits(names):
    for name in names:
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


@pytest.mark.slow
def test_recipes_for_small_cards_leave_a_gigabyte_with_their_rewards():
    assert len(SMALL) == 4
    for name in SMALL:
        config, memory = load_config(name), memory_class(name)
        plan = make_plan(config, memory=memory)
        assert memory is not None and plan.peak is not None
        assert plan.peak.total <= memory - 1.0e9, plan.peak


@pytest.mark.slow
def test_flux_at_512_pixels_trains_in_28_gb_and_in_12_with_4_bits():
    exact = load_config("flux.1-dev-nft-12gb", ["memory.base_bits=null", "lora.rank=4"])
    rounded = load_config("flux.1-dev-nft-12gb", ["lora.rank=16"])
    for config, most in ((exact, 28e9), (rounded, 12e9)):
        assert config.memory.gradient_checkpointing and config.optim.micro_batch == 1
        assert config.pipeline.height == config.pipeline.width == 512
        plan = make_plan(config, memory=int(most))
        assert plan.fits and plan.phases[0].phase == "encode"
