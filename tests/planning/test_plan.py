"""What `flowrl plan` says: from shapes alone, and always what to type."""

import json
import re
from dataclasses import replace

import pytest
import torch

from flowrl.cli import main
from flowrl.config import load_config
from flowrl.config.rewards import RewardOptions
from flowrl.errors import UserError
from flowrl.planning import duration
from flowrl.planning import plan as planning
from flowrl.planning.memory import Footprint
from flowrl.planning.model_specs import build_network, spec_for
from flowrl.planning.plan import (
    CLIP_H,
    CLIP_L,
    DETECTORS,
    HPSV3,
    gpus_of,
    make_plan,
    memory_class,
    parse_memory,
    reward_networks,
    rewards_bytes,
)
from flowrl.planning.suggestions import find_remedies


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            main(["plan", *words])
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


def test_memory_and_rewards_are_counted_as_they_are_written():
    for text, size in [("24GB", 24e9), ("80G", 80e9), ("24GiB", 24 * 2**30), (" 141 gb ", 141e9)]:
        assert parse_memory(text) == size
    for text in ["", "GB", "much", "24XB", "-3GB", "0GB", "24"]:
        with pytest.raises(UserError, match="expected a size such as 24GB"):
            parse_memory(text)
    assert memory_class("sd3.5-medium-grpo-24gb") == memory_class("x-24GB.yaml") == 24e9
    assert memory_class("quickstart") is None


def test_networks_of_rewards_are_counted_once_in_a_process_and_in_each_of_a_pool():
    def size(*entries: dict) -> int:
        return rewards_bytes([RewardOptions.model_validate(entry) for entry in entries])

    pickscore, clipscore = {"name": "pickscore"}, {"name": "clipscore"}
    assert size(pickscore) == 4 * CLIP_H
    assert size(pickscore | {"args": {"dtype": "bf16"}}) == 2 * CLIP_H
    assert size(pickscore | {"args": {"device": "cpu"}}) == 0
    assert (
        size({"name": "hpsv3", "executor": {"kind": "http", "urls": ["http://127.0.0.1:1"]}}) == 0
    )
    assert size({"name": "diversity", "args": {"measure": "clip"}}, clipscore) == 4 * CLIP_L
    assert size({"name": "hpsv3"}, {"name": "hpsv3"}) == 2 * HPSV3
    geneval = {"name": "geneval", "args": {"detector": "owlv2", "colors": "clip"}}
    assert size(geneval) == 4 * (DETECTORS["owlv2"] + CLIP_L)
    assert size({"name": "ocr"}) == size({"name": "geneval"}) == 0
    assert reward_networks(RewardOptions(name="mine:Reward")) is None

    cosine = pickscore | {"args": {"scale": "cosine"}}
    alike = [pickscore, cosine, clipscore, {"name": "aesthetic"}, geneval]
    assert size(*alike) == 4 * (CLIP_H + CLIP_L + DETECTORS["owlv2"])
    assert size(clipscore, clipscore | {"args": {"dtype": "bf16"}}) == 6 * CLIP_L
    pool = {"executor": {"kind": "pool", "workers": 2}}
    assert size(clipscore | pool, {"name": "aesthetic"} | pool, clipscore) == 4 * 5 * CLIP_L
    several = geneval | pool | {"args": geneval["args"] | {"mode": ["partial", "strict"]}}
    assert size(several, several | {"component": "strict"}) == 2 * size(geneval)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("quickstart", marks=pytest.mark.slow),
        pytest.param("quickstart-flux", marks=pytest.mark.slow),
        "quickstart-sana",
    ],
)
def test_the_quickstarts_are_planned_as_they_lie_in_the_package(name):
    found = make_plan(load_config(name))
    assert found.peak is not None and found.peak.total > 0 and not found.unknown


def test_shapes_come_from_a_folder_or_a_known_name():
    for path in ["tiny-sd3", "tiny-flux", "tiny-sana"]:
        from flowrl.backbones.loading import load_pipeline

        size, pipeline = spec_for(path), load_pipeline(path, dtype="fp32", device="cpu")
        real = pipeline.transformer
        network = build_network(size.transformer, size.config, torch.float32)
        assert sum(p.numel() for p in network.parameters()) == sum(
            p.numel() for p in real.parameters()
        )
        assert size.autoencoder_params == sum(p.numel() for p in pipeline.vae.parameters())
        encoders = [c for n, c in pipeline.components.items() if n.startswith("text_encoder") and c]
        assert sum(e.parameters for e in size.text_encoders) == sum(
            p.numel() for e in encoders for p in e.parameters()
        )
        assert size.native_pixels == 64 and size.pooled_width == real.config.get(
            "pooled_projection_dim"
        )
    for name, pixels in (
        ("stabilityai/stable-diffusion-3.5-medium", 1024),
        ("black-forest-labs/FLUX.1-dev", 1024),
        ("Efficient-Large-Model/Sana_1600M_1024px_diffusers", 1024),
    ):
        assert spec_for(name).checkpoint == name and spec_for(name).native_pixels == pixels


GIB = 10**9


def pretended(config) -> Footprint:
    m = config.memory
    weights = 8 * GIB if m.base_bits is None else m.base_bits * GIB // 2
    weights += 6 * GIB if m.text_encoders == "keep" else 0
    training = config.optim.micro_batch * GIB // (4 if m.gradient_checkpointing else 1)
    decode = config.pipeline.decode_batch * GIB
    phase, most = max(("training", training), ("decode", decode), key=lambda pair: pair[1])
    return Footprint(phase=phase, parts={"CUDA overhead": 0, "all": weights + most})


def small(*changes: str):
    return load_config("quickstart", ["optim.micro_batch=16", "pipeline.decode_batch=2", *changes])


def test_the_fewest_changes_that_fit_are_recommended_in_their_groups():
    # The first change that fits is recommended. 30 GB: checkpointing brings 18, micro-batches of
    # 4 bring 18 too, and cost less time.
    found = find_remedies(small(), pretended, 20 * GIB)
    assert found.best is not None and found.best.changes == ("memory.gradient_checkpointing=true",)
    peaks = {r.changes[0]: r.peak / GIB for r in found.alone}
    assert peaks["optim.micro_batch=4"] == 18 and peaks["memory.text_encoders=free"] == 24
    assert not any(word.startswith(("rollout.", "pipeline.decode")) for word in peaks)
    found = find_remedies(small("pipeline.decode_batch=8"), pretended, 11 * GIB)
    assert found.best is not None and found.best.peak <= 11 * GIB
    keys = [word.partition("=")[0] for word in found.best.changes]
    assert len(set(keys)) == len(keys) >= 3
    other = load_config("quickstart", ["optim.micro_batch=16", "pipeline.decode_batch=8"]
                        + list(found.best.changes))  # fmt: skip
    assert pretended(other).total == found.best.peak
    asked = []

    def once(config):
        asked.append(config.model_dump_json())
        return pretended(config)

    find_remedies(small(), once, 20 * GIB)
    assert len(set(asked)) == len(asked)
    found = find_remedies(small(), pretended, 1 * GIB)
    assert found.best is None and found.least == 3 * GIB
    config = load_config("tiny-sd3-solrl-geneval", ["pipeline.path=tiny-sd3"])
    words = [r.changes[0] for r in find_remedies(config, pretended, GIB).alone]
    assert words and not any("base_bits" in word for word in words)
    # Where likelihoods are compared both batches change together. In 16 bits; the recommended
    # recipe keeps one shape, and its ratio is 1.
    config = load_config("flux.1-dev-grpo-80gb", ["pipeline.decode_batch=2"])
    found = find_remedies(config, pretended, 11 * GIB)
    pair = ("optim.micro_batch=6", "rollout.batch_size=6")
    assert found.best is not None and found.best.changes == pair
    for remedy in found.alone:
        changed = load_config("flux.1-dev-grpo-80gb", list(remedy.changes))
        assert changed.optim.micro_batch == changed.rollout.batch_size
    changes = ["pipeline.dtype=fp32", "rollout.batch_size=8", "pipeline.decode_batch=2"]
    exact = load_config("flux.1-dev-grpo-80gb", changes)
    words = [r.changes for r in find_remedies(exact, pretended, 1 * GIB).alone]
    assert ("optim.micro_batch=6",) in words
    assert ("pipeline.dtype=bf16", "optim.micro_batch=8", "rollout.batch_size=8") in words


def test_the_recommended_words_make_the_recipe_fit(monkeypatch):
    def faked(size, setup):
        training = setup.micro_batch * GIB
        return [
            Footprint(phase="rollout", parts={"CUDA overhead": 0, "all": 2 * GIB}),
            Footprint(phase="training", parts={"CUDA overhead": 0, "all": 2 * GIB + training}),
        ]

    monkeypatch.setattr(planning, "footprints", faked)
    config = load_config("quickstart", ["memory.gradient_checkpointing=true"])
    found = make_plan(config, memory=20 * GIB)
    assert found.fits is False and found.remedies is not None and found.remedies.best is not None
    changed = load_config(
        "quickstart", ["memory.gradient_checkpointing=true", *found.remedies.best.changes]
    )
    again = make_plan(changed, memory=20 * GIB)
    assert again.fits and again.peak is not None
    assert again.peak.total == found.remedies.best.peak


@pytest.mark.slow
def test_the_plan_is_told_in_full_as_text_and_json(run):
    code, out, _ = run("quickstart-grpo", "--gpus", "4", "--memory", "24GB")
    assert code == 0
    assert "6 prompts with 16 images each, in 1 update, on 4 GPUs" in out
    assert "An update learns from 192 nodes, whatever the number of GPUs." in out
    (head,) = re.findall(r"^GB on a GPU +(.*)$", out, re.M)
    assert head.split() == ["encode", "rollout", "decode", "rewards", "training", "evaluation"]
    for name in ("transformer", "text encoders", "activations", "total"):
        (row,) = re.findall(rf"^{name} +(.*)$", out, re.M)
        assert len(row.split()) == 6
    assert "It fits a GPU of 24.00 GB." in out
    code, out, _ = run("quickstart-grpo", "--gpus", "4", "--memory", "24GB", "--json")
    found = json.loads(out)
    assert code == 0 and found["gpus"] == len(found["shares"]) == 4
    assert found["iteration"]["images"] == 96 and found["run"]["iterations"] == 170
    assert found["fits"] is True and found["peak"]["bytes"] > 1e6 and found["remedies"] is None
    total = found["phases"]["training"].pop("total")
    assert total == sum(found["phases"]["training"].values())


@pytest.mark.slow
def test_memory_is_that_of_the_iterations_that_need_most():
    wide = ["optim.micro_batch=1", "rollout.num_inference_steps=8", "run.iterations=9",
            "rollout.tree={kind: flow_grpo}"]  # fmt: skip
    less = [*wide, "rollout.depth_pruning={start: 3, size: 4, until: 4}"]
    whole, pruned = (make_plan(load_config("quickstart", words)) for words in (wide, less))
    assert len(whole.work.kinds) == 1 < len(pruned.work.kinds)
    held = [[p.parts.get("latents") for p in plan.phases] for plan in (whole, pruned)]
    assert held[0] == held[1]


def test_the_command_tells_what_does_not_work(run):
    changes = [
        "rollout.prompts_per_iteration=8",
        "optim.updates_per_rollout=2",
        "pipeline.path=a/b",
    ]
    _, out, _ = run("quickstart", *changes, "--gpus", "8")
    assert "they work 100% of drawing, 50% of learning. None waits with 4 GPUs, or with" in out
    assert "rollout.prompts_per_iteration=16." in out
    code, _, err = run("quickstart", "objective={kind: gdro}", "--gpus", "7")
    assert code == 1 and "rollout.prompts_per_iteration=8, or 6 processes" in err.replace("\n", " ")
    code, _, err = run("--memory", "24GB")
    assert code == 1 and "No recipe given" in err
    code, out, _ = run("quickstart", "pipeline.path=somebody/something")
    assert code == 0 and "6 prompts with 16 images each" in out
    assert "cannot be planned without its shapes: known are black-forest-labs/" in out
    assert "give the folder" in out


def test_make_plan_notes_and_refuses(monkeypatch):
    plan = make_plan(load_config("quickstart", ["rewards=[{name: 'json:dumps'}]",
                                                "pipeline.path=a/b"]))  # fmt: skip
    assert plan.notes == ("The weights of json:dumps are not counted: nobody knows them.",)
    assert replace(plan, memory=1).fits is None
    config = load_config("quickstart", ["pipeline.path=tiny-flux"])
    with pytest.raises(UserError, match="of the family flux, but pipeline.backbone is sd3"):
        make_plan(config, gpus=1)

    class Mine:
        pass

    monkeypatch.setattr("flowrl.planning.plan.backbone_class", lambda name: Mine)
    with pytest.raises(UserError, match="set lora.targets, or make lora_targets an attribute"):
        make_plan(load_config("quickstart", ["lora.targets=null"]))
    assert make_plan(load_config("quickstart", ["lora.targets=[attn.to_q]"])).phases


def test_the_recipe_says_how_many_gpus_and_what_does_not_fit_ends_with_1(run, monkeypatch):
    assert [gpus_of(name) for name in ("flux.1-dev-grpo-80gb", "quickstart")] == [8, 1]

    def faked(size, setup):
        whole = 4 * GIB if setup.text_encoders == "keep" else 3 * GIB
        return [
            Footprint(phase="encode", parts={"CUDA overhead": 0, "all": whole}),
            Footprint(phase="training", parts={"CUDA overhead": 0, "all": GIB}),
        ]

    monkeypatch.setattr(planning, "footprints", faked)
    code, out, _ = run("quickstart", "--memory", "3GB")
    assert code == 1 and "memory.text_encoders=offload" in out
    assert "micro_batch" not in out  # which changes nothing here
    code, out, _ = run("quickstart", "--memory", "2GB", "memory.text_encoders=free")
    assert code == 1 and "each alone gives" not in out  # no empty table
    assert "Everything but encoding fits, with 1.00 GB: encode on the CPU" in out
    code, out, _ = run("quickstart", "--memory", "4GB", "--json")
    assert code == 0 and json.loads(out)["time"]["hours"] is None


@pytest.mark.slow
def test_operations_are_those_of_every_block_and_time_is_theirs_by_the_rate():
    config = load_config("quickstart")
    work = planning.count_work(config)
    kind = work.kinds[0]
    spec = spec_for("tiny-sd3")
    setup = planning.build_setup(config, spec, work.needs, planning.split_work(kind.load, 1), kind)
    one = duration.forward_of(spec, setup)
    assert duration.block_counts(spec.config)["num_layers"] > duration.SHORT + 1
    whole = duration._operations(one, duration.block_counts(spec.config))
    assert duration.forward_operations(one) == whole > 0
    found = make_plan(config, gpus=2).duration
    assert found is not None and found.seconds is found.hours is found.cost(1.0) is None
    passes = work.first.sampling + 2 * work.first.training + work.first.recomputed
    passes += work.first.reference
    assert found.iteration == whole * passes + work.first.images * duration.decode_operations(one)
    assert found.run > config.run.iterations * found.iteration * 0.99
    timed = replace(found, rate=found.iteration / 10)
    assert timed.seconds == pytest.approx(5) and timed.hours is not None
    assert timed.cost(3.0) == pytest.approx(timed.hours * 2 * 3)
