"""Two processes do what one does with the same global batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowrl.config import config_yaml
from flowrl.utils.files import load_state

pytestmark = pytest.mark.slow  # processes that are started take a minute

# Runs once as it is and once under a launcher; every process writes what it saw.
SCRIPT = """
import dataclasses
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
from flowrl.assembly.learner import (
    ProvidedObjects,
    all_prompts_to_encode,
    build_evaluator,
    build_learner,
)
from flowrl.assembly.text import TextCaches
from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.backbones.offload import encoders_of
from flowrl.utils.distributed import Runtime
from flowrl.api import align
from flowrl.utils.files import load_state, save_state

FINAL = "checkpoints/step-000002/state.safetensors"


def changed(config, **run):
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


runtime = Runtime(device="cpu")
config = load_config(Path(sys.argv[1]))
folder = Path(sys.argv[2])
seen = {}
images = ["rollout.tree={kind: ode}", "optim.micro_batch=3"]  # smaller than a group
cases = {
    f"updates {updates}": config.model_copy(
        update={"optim": config.optim.model_copy(update={"updates_per_rollout": updates})}
    )
    for updates in (1, 2)
} | {
    kind: load_config(
        Path(sys.argv[1]), [f"objective={{kind: {kind}, noising: {{count: 2}}}}", *images]
    )
    for kind in ("gdro", "nft")
} | {
    # gdro needs whole prompts on a process, of which an audit of one has none for the second.
    f"explored {kind}": load_config(
        Path(sys.argv[1]),
        [
            f"objective={{kind: {kind}, noising: {{count: 2}}}}",
            *images,
            "rollout.explore={candidates: 7, num_inference_steps: 2, precision: bf16}",
            "rollout.explore.audit.prompts=1",
            f"run.output_dir={folder / kind}-{runtime.world_size}",
        ],
    )
    for kind in ("gdro",)
}
for name, case in cases.items():

    def reward(images, prompts, metadata):
        scores = images.mean((1, 2, 3))
        # One group without signal, in the share of one process only.
        return [0.5 if p == prompts_of[0] else s for p, s in zip(prompts, scores.tolist())]

    learner = build_learner(case, runtime, ProvidedObjects(rewards={"r": reward}))
    prompts_of = [p.text for p in learner.source.prompts.at(0)]
    generator = torch.Generator().manual_seed(0)
    for p in learner.policy.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=generator)
    gradients = []
    clip = runtime.clip_gradients

    def record(parameters, max_norm):
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        return clip(parameters, max_norm)

    runtime.clip_gradients = record
    rollout, metrics = learner.iterate(0)
    runtime.clip_gradients = clip
    seen[name] = {
        "reward": rollout.reward,
        "group": rollout.group,
        "images": runtime.gather(rollout.images),
        "gradients": gradients,
        "policy": [p.data for p in learner.policy.parameters()],
        "logged": {k: v for k, v in metrics.items() if not k.startswith("time/")},
        "metrics": {k: v for k, v in metrics.items() if k.startswith("explore/")},
        "chosen": None if rollout.explored is None else rollout.explored.chosen,
    }
given = ProvidedObjects()
evaluator = build_evaluator(config, learner.policy.backbone.pipeline, learner.specs, given)
for count in (5, 1):
    part = dataclasses.replace(evaluator, prompts=evaluator.prompts[:count])
    result = part(part.backbone.velocity, runtime)
    seen[f"evaluation {count}"] = {"scores": result.scores, "images": result.images}
# Each encodes a share into the folder that both see, and all where each sees a folder of its own.
for place in ("", f"-{runtime.rank}"):
    prompts = folder / f"prompts-{runtime.world_size}{place}"
    asked = ["memory.text_encoders=free", f"memory.prompt_cache={prompts}"]
    case = load_config(Path(sys.argv[1]), asked)
    texts, given = TextCaches(case), ProvidedObjects()
    needed = all_prompts_to_encode(case, given)
    learned = build_learner(case, runtime, given, texts, needed)
    backbone = learned.policy.backbone
    build_evaluator(case, backbone.pipeline, learned.specs, given, texts)
    seen[f"texts {len(place)}"] = [
        len(needed),
        len(texts.get(backbone, 1.0).known),
        sum(texts.get(backbone, g).has(prompt) for g, prompt in needed),
        encoders_of(backbone.pipeline) == [],
    ]
seen["from main"] = [
    runtime.from_main(lambda: data if runtime.is_main else b"not asked").decode()
    for data in (b"", b"the main one's")
]
seen["any"] = [runtime.any(runtime.rank == 1), runtime.any(False)]
seen["sum"] = runtime.sum(float(runtime.rank + 1))
seen["merge"] = runtime.merge({f"rank {runtime.rank}": "here"})
# Every process has a disk of its own, and only the main one's holds what is resumed.
own = folder / f"own-{runtime.world_size}-{runtime.rank}"
case = load_config(
    Path(sys.argv[1]),
    [
        f"run={{output_dir: {own}, iterations: 2, checkpoint_every: 1, sample_every: 0}}",
        "rollout.explore={candidates: 5, num_inference_steps: 2, precision: bf16}",
        "rollout.explore.audit={every: 1, prompts: 1}",
        "evaluation={every: 1, num_images: 3}",
        "run.stop_when_hacking={held_out: dark, patience: 1}",
        "rewards=[{name: brightness}, {name: brightness, label: dark, held_out: true}]",
    ],
)
align(changed(case, iterations=1))
align(case, resume="latest")
seen["resumed"] = [sorted(p.name for p in own.glob("*")), load_state(own / FINAL)["iteration"]
                   if runtime.is_main else None]  # fmt: skip
# A network in parts: the first process has one tree more than the second, and in one case
# nothing to learn from.
for kind, more, tree in (
    ("nft", "{kind: nft, noising: {count: 2}}", "{kind: ode}"),
    ("grpo", "{kind: grpo}", "{kind: flow_grpo}"),
):
    for shard in ("null", "node"):
        case = load_config(
            Path(sys.argv[1]),
            [f"objective={more}", f"rollout.tree={tree}", f"runtime.shard={shard}",
             "optim.micro_batch=4", "rollout.batch_size=5", "ema.decay=0.5"],
        )  # fmt: skip

        def reward(images, prompts, metadata):
            scores = images.mean((1, 2, 3)).tolist()
            return [s if p == prompts_of[-1] else 0.5 for p, s in zip(prompts, scores)]

        parts = Runtime(device="cpu")
        learner = build_learner(case, parts, ProvidedObjects(rewards={"r": reward}))
        prompts_of = [p.text for p in learner.source.prompts.at(0)]
        generator = torch.Generator().manual_seed(0)
        for p in learner.policy.parameters():
            p.data += 0.02 * torch.randn(p.shape, generator=generator)
        rollout, metrics = learner.iterate(0)
        evaluator = build_evaluator(
            case, learner.policy.backbone.pipeline, learner.specs, ProvidedObjects()
        )
        few = dataclasses.replace(evaluator, prompts=evaluator.prompts[:1])
        with learner.policy.using("ema"):
            scores = few(few.backbone.velocity, parts).scores
        held = sum(
            (t.to_local() if hasattr(t, "to_local") else t).numel()
            for t in learner.policy.network.parameters()
        )
        seen[f"sharded {kind} {shard}"] = {
            "policy": [p.data for p in learner.policy.parameters()],
            "reward": rollout.reward, "scores": scores, "numbers": held,
            "norm": metrics["grad/norm"],
        }
last = runtime.rank == runtime.world_size - 1


def dead(images, prompts, metadata):
    if last:
        raise RuntimeError("the server is gone")
    return [0.5] * len(images)


def short(images, prompts, metadata):
    return [0.5] * (len(images) - last)


for reward in (dead, short):
    learner = build_learner(config, runtime, ProvidedObjects(rewards={reward.__name__: reward}))
    try:
        learner.iterate(0)
    except UserError as error:
        seen[reward.__name__] = str(error)
save_state(folder / f"{runtime.world_size}-{runtime.rank}", seen)
"""


@pytest.fixture(scope="module")
def seen(tiny_config, tmp_path_factory) -> dict[str, dict]:
    """What one process saw, and each of two: keys "1-0", "2-0", "2-1"."""
    folder = tmp_path_factory.mktemp("processes")
    config = tiny_config(
        # Two trees of a prompt, so that the second prompt's group lies on both processes.
        rollout={
            "prompts_per_iteration": 3,
            "group_size": 4,
            "num_inference_steps": 3,
            "tree": {"kind": "branch_grpo", "splits": [0]},
            "batch_size": 12,
            "merge_lora": False,
        },
        optim={"lr": 1e-3, "micro_batch": 6},
        evaluation={"prompts": "tiny:colors:test", "num_images": 5, "num_inference_steps": 2},
    )
    (folder / "config.yaml").write_text(config_yaml(config))
    script = folder / "script.py"
    script.write_text(SCRIPT)
    words = [str(script), str(folder / "config.yaml"), str(folder)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    # With --cpu, or without --multi_gpu, accelerate starts a single process unless it finds MPI.
    launcher = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--multi_gpu"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--main_process_port", str(free_port())]
    for start in ([], launcher):
        done = subprocess.run(
            [sys.executable, *start, *words],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return {name: load_state(folder / name) for name in ("1-0", "2-0", "2-1")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_rewards_and_gradients_are_those_of_one_process(seen):
    for case in ["updates 1", "updates 2", "gdro", "nft", "explored gdro"]:
        one, *two = (seen[name][case] for name in seen)
        for part in two:
            assert torch.equal(part["group"], one["group"])
            torch.testing.assert_close(part["images"], one["images"], rtol=0, atol=1e-5)
            torch.testing.assert_close(part["reward"], one["reward"], rtol=0, atol=1e-4)
    # The gradient is that of one process. Also where whole groups are compared, two of the three
    # on the first process.
    for case in ["updates 1", "gdro", "nft", "explored gdro"]:
        one, first, second = (seen[name][case]["gradients"][0] for name in seen)
        assert torch.equal(first, second)
        error = (first - one).norm() / one.norm()
        assert one.norm() > 0 and error < 2e-4, error
    # With two updates both gradients are.
    for update in range(2):
        one, first, second = (seen[n]["updates 2"]["gradients"][update] for n in seen)
        assert torch.equal(first, second)
        error = (first - one).norm() / one.norm()
        assert one.norm() > 0 and error < 2e-4, error
    # What is logged is of all rows, on every process.
    for case in ["updates 1", "updates 2", "gdro", "nft"]:
        one, first, second = (seen[name][case]["logged"] for name in seen)
        assert first == second and set(first) == set(one)
        whole = {k: v for k, v in one.items() if not k.startswith("tree/distance/roots")}
        for name, value in whole.items():
            assert first[name] == pytest.approx(value, rel=2e-3, abs=2e-4), (case, name)
    # Processes hold the same policy afterwards.
    for updates in ("updates 1", "updates 2"):
        pairs = zip(seen["2-0"][updates]["policy"], seen["2-1"][updates]["policy"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_evaluations_texts_and_failures_are_shared(seen):
    # Candidates evaluations and texts are whole on every process.
    # Every process knows all candidates and their audit.
    one, first, second = (seen[name]["explored gdro"] for name in seen)
    assert torch.equal(first["chosen"], one["chosen"])
    assert torch.equal(second["chosen"], one["chosen"])
    for name, value in one["metrics"].items():
        same = pytest.approx(value, abs=1e-4, nan_ok=True)  # of one prompt rho may not exist
        assert first["metrics"][name] == same and second["metrics"][name] == same, name
    assert one["metrics"]["explore/candidates"] == 21
    assert "explore/audit/rho" in one["metrics"]
    # Evaluation is whole on every process also with fewer images.
    for count in [5, 1]:
        one, *two = (seen[name][f"evaluation {count}"] for name in seen)
        for part in two:
            torch.testing.assert_close(part["scores"], one["scores"], rtol=0, atol=1e-4)
            assert part["images"].dtype == torch.uint8
            assert part["images"].shape == one["images"].shape
    # Prompts are encoded in shares and every process has all.
    for name, shared, own in (("1-0", 1, 1), ("2-0", 0.5, 1), ("2-1", 0.5, 1)):
        for place, part in (("texts 0", shared), ("texts 2", own)):
            needed, encoded, had, freed = seen[name][place]
            assert had == needed and freed
            assert abs(encoded - part * needed) < 1
    # A run is resumed from the main process's disk.
    assert seen["2-1"]["resumed"][0] == [] and seen["2-0"]["resumed"][1] == 2
    # Decisions and failures are shared.
    # Decisions and notes are shared.
    assert seen["1-0"]["any"] == [False, False] and seen["1-0"]["sum"] == 1
    for name in ("2-0", "2-1"):
        assert seen[name]["any"] == [True, False] and seen[name]["sum"] == 3
        assert seen[name]["from main"] == ["", "the main one's"]
        assert seen[name]["merge"] == {"rank 0": "here", "rank 1": "here"}
    # A reward that fails on one process stops all with one message.
    for reward, words in [
        ("dead", ("6 of 12 images have no reward", "dead", "the server is gone", "prompt")),
        ("short", ("'short' answered with shape (5,) for 6 images",)),
    ]:
        first, second = (seen[name][reward] for name in ("2-0", "2-1"))
        assert first == second
        assert all(word in first for word in words), first


def test_a_network_in_parts_learns_the_same_bit_for_bit(seen):
    for kind in ("nft", "grpo"):
        for name in ("2-0", "2-1"):
            whole, parts = (seen[name][f"sharded {kind} {shard}"] for shard in ("null", "node"))
            assert parts["numbers"] < 0.7 * whole["numbers"]
            assert parts["norm"] == whole["norm"] > 0
            for part in ("reward", "scores"):
                assert torch.equal(parts[part], whole[part]), (kind, part)
            for a, b in zip(parts["policy"], whole["policy"], strict=True):
                assert torch.equal(a, b), kind
