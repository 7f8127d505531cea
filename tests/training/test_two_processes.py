"""Two processes share evaluations, texts, what is resumed, and failures."""

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
from flowrl.utils.files import save_state

runtime = Runtime(device="cpu")
config = load_config(Path(sys.argv[1]))
folder = Path(sys.argv[2])
seen = {}
learner = build_learner(config, runtime, ProvidedObjects())
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
        len(texts.get(backbone, 1.0).encoded),
        sum(texts.get(backbone, g).has(prompt) for g, prompt in needed),
        encoders_of(backbone.pipeline) == [],
    ]
last = runtime.rank == runtime.world_size - 1


def dead(images, prompts, metadata):
    if last:
        raise RuntimeError("the server is gone")
    return [0.5] * len(images)


learner = build_learner(config, runtime, ProvidedObjects(rewards={"dead": dead}))
try:
    learner.iterate(0)
except UserError as error:
    seen["dead"] = str(error)
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


def test_evaluations_texts_and_failures_are_shared(seen):
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
    # A reward that fails on one process stops all with one message.
    first, second = (seen[name]["dead"] for name in ("2-0", "2-1"))
    assert first == second and "6 of 12 images have no reward" in first
    assert "the server is gone" in first
