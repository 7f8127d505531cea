"""What `flowrl plan` says: from shapes alone, and always what to type."""

import re

import pytest

from flowrl.config import load_config
from flowrl.config.rewards import RewardOptions
from flowrl.errors import UserError
from flowrl.planning.duration import CARDS
from flowrl.planning.memory import Footprint, MemoryPlan
from flowrl.planning.plan import gpus_of, make_plan, memory_class, parse_memory
from flowrl.planning.rewards import (
    CLIP_H,
    CLIP_L,
    DETECTORS,
    REWARDS,
    reward_networks,
    rewards_bytes,
)


@pytest.fixture
def run(flowrl, even_activations):
    return lambda *words: flowrl("plan", "--host-memory", "2000GB", *words)


def test_memory_and_rewards_are_counted_as_they_are_written():
    sizes = {"24GB": 24e9, "80G": 80e9, "24GiB": 24 * 2**30, " 141 gb ": 141e9, "24": 24e9}
    for text, size in sizes.items():
        assert parse_memory(text) == size
    for text in ["", "GB", "much", "24XB", "-3GB", "0GB"]:
        with pytest.raises(UserError, match="expected a size such as 24GB"):
            parse_memory(text)
    assert memory_class("sd3.5-medium-grpo-24gb") == memory_class("x-24GB.yaml") == 24e9
    assert memory_class("quickstart") is None


def test_networks_of_rewards_are_counted_once():
    def size(*entries: dict) -> int:
        return rewards_bytes([RewardOptions.model_validate(entry) for entry in entries])

    clip_h, clip_l = CLIP_H.parameters, CLIP_L.parameters
    mask2former = DETECTORS["mask2former"].parameters
    pickscore, clipscore = {"name": "pickscore"}, {"name": "clipscore"}
    assert size(pickscore) == 4 * clip_h
    assert size(pickscore | {"args": {"dtype": "bf16"}}) == 2 * clip_h
    assert size(pickscore | {"args": {"device": "cpu"}}) == 0
    assert (
        size({"name": "hpsv3", "executor": {"kind": "http", "urls": ["http://127.0.0.1:1"]}}) == 0
    )
    assert size({"name": "hpsv3"}, {"name": "hpsv3"}) == 2 * REWARDS["hpsv3"].parameters
    geneval = {"name": "geneval", "args": {"detector": "mask2former", "colors": "clip"}}
    assert size(geneval) == 4 * (mask2former + clip_l)
    assert size({"name": "ocr"}) == size({"name": "geneval"}) == 0
    assert reward_networks(RewardOptions(name="mine:Reward")) is None

    cosine = pickscore | {"args": {"scale": "cosine"}}
    alike = [pickscore, cosine, clipscore, {"name": "aesthetic"}, geneval]
    assert size(*alike) == 4 * (clip_h + clip_l + mask2former)
    assert size(clipscore, clipscore | {"args": {"dtype": "bf16"}}) == 6 * clip_l


GIB = 10**9


def test_the_command_tells_what_does_not_work(run):
    changes = ["rollout.prompts_per_iteration=8", "optim.updates_per_rollout=2"]
    code, out, _ = run("quickstart", *changes, "pipeline.path=somebody/something", "--gpus", "8")
    assert code == 0 and "a multiple of 16." in out and "somebody/something" in out
    code, _, err = run("quickstart", "objective={kind: gdro}", "--gpus", "7")
    assert code == 1 and "rollout.prompts_per_iteration=8, or 6 processes" in err.replace("\n", " ")


def test_the_recipe_says_how_many_gpus_and_what_does_not_fit_ends_with_1(run, monkeypatch):
    assert [gpus_of(name) for name in ("flux.1-dev-grpo-80gb", "quickstart")] == [8, 1]

    def faked(plan):
        whole = 4 * GIB if plan.config.memory.text_encoders == "keep" else 3 * GIB
        return [
            Footprint(phase="encode", parts={"CUDA overhead": 0, "all": whole}),
            Footprint(phase="training", parts={"CUDA overhead": 0, "all": GIB}),
        ]

    monkeypatch.setattr(MemoryPlan, "footprints", faked)
    code, out, _ = run("quickstart", "--memory", "3GB")
    assert code == 1 and "memory.text_encoders=offload" in out
    assert "micro_batch" not in out  # which does not change this phase
    code, out, _ = run("quickstart", "--memory", "2GB", "memory.text_encoders=free")
    assert code == 1 and "memory.text_encoders=offload" not in out
    assert "--encode-only memory.prompt_cache=PATH pipeline.device=cpu" in out
    assert run("quickstart", "--memory", "4GB")[0] == 0


def test_operations_are_counted_for_every_forward(even_activations):
    config = load_config("quickstart")
    plan = make_plan(config, gpus=2)
    time, first = plan.duration, plan.work.first
    assert time is not None
    passes = first.sampling + 2 * first.training + first.recomputed + first.reference
    longer = make_plan(load_config("quickstart", ["rollout.num_inference_steps=16"])).duration
    assert longer is not None and longer.iteration > time.iteration > passes
    assert time.run > config.run.iterations * time.iteration * 0.99


def test_a_checkpoint_of_another_class_is_planned_with_what_to_change(run):
    path = "pipeline.path=black-forest-labs/FLUX.2-klein-base-9B"
    code, out, _ = run("sd3.5-medium-nft-24gb", path, "lora.targets=null")
    assert code == 1 and "optim.micro_batch=1" in out and "memory.base_bits=4" in out
    (row,) = re.findall(r"^transformer +(.*)$", out, re.M)
    weights = max(float(word) for word in row.split())
    assert weights == pytest.approx(18.16, rel=0.01)


def test_hours_are_a_range_for_each_card_that_holds_the_recipe(run):
    plan = make_plan(load_config("quickstart"), gpus=2)
    time = plan.duration
    assert time is not None and plan.peak is not None
    compiled = make_plan(load_config("quickstart", ["pipeline.compile=true"]), gpus=2).duration
    for share, each in ((0.25, time), (0.5, compiled)):  # of the peak, at most
        for name, (fewest, most) in each.estimates(plan.peak.total).items():
            assert fewest == pytest.approx(time.run / share / CARDS[name].peak / 2 / 3600)
            assert 2 * fewest <= most < 2.1 * fewest
    assert list(time.estimates(140 * GIB)) == ["H200", "B200", "Instinct MI300X"]
    _, out, _ = run("quickstart", "--price", "2")
    assert re.search(r"^L40S +\S+ to \S+ +\S+ to ", out, re.M)
    fewest, most = (h * 60 for h in plan.duration.estimates(plan.peak.total)["L40S"])
    minutes = fewest / 2  # a half of the run at best
    _, out, _ = run("quickstart", "--gpus", "2", f"run.max_minutes={minutes}")
    row = re.search(r"^L40S +\S+ to \S+ +(\S+) to (\S+)", out, re.M)
    assert [float(n) for n in row.groups()] == pytest.approx([72 * minutes / most, 36], rel=0.05)


def test_the_machine_s_memory_is_compared(run):
    code, out, _ = run("quickstart", "--host-memory", "0.001GB")
    assert code == 1 and "--host-memory" in out
