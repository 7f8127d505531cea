"""Two processes share the encoding of texts, and failures."""

import pytest

from flowrl.config import config_yaml
from flowrl.utils.files import load_state

pytestmark = pytest.mark.slow  # processes that are started take a minute

# Every process writes what it saw.
SCRIPT = """
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
# Each encodes a share into the folder that both see, and all where each sees a folder of its own.
for place, name in (("one disk", "prompts"), ("own disk", f"prompts-{runtime.rank}")):
    prompts = folder / name
    asked = ["memory.text_encoders=free", f"memory.prompt_cache={prompts}"]
    case = load_config(Path(sys.argv[1]), asked)
    texts, given = TextCaches(case), ProvidedObjects()
    needed = all_prompts_to_encode(case, given)
    learned = build_learner(case, runtime, given, texts, needed)
    backbone = learned.policy.backbone
    build_evaluator(case, backbone.pipeline, learned.specs, given, texts)
    seen[place] = [
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
save_state(folder / str(runtime.rank), seen)
"""


def test_texts_and_failures_are_shared(launch, tiny_config, tmp_path):
    config = tiny_config(
        rollout={"prompts_per_iteration": 3, "num_inference_steps": 2},
        evaluation={"prompts": "tiny:colors:test", "num_images": 5, "num_inference_steps": 2},
    )
    (tmp_path / "config.yaml").write_text(config_yaml(config))
    for process in launch("-c", SCRIPT, tmp_path / "config.yaml", tmp_path):
        output = process.communicate(timeout=900)[0]
        assert process.returncode == 0, output
    first, second = (load_state(tmp_path / rank) for rank in "01")
    # Prompts are encoded in shares, and every process has all.
    for seen in (first, second):
        for place, share in (("one disk", 0.5), ("own disk", 1)):
            needed, encoded, had, freed = seen[place]
            assert had == needed and freed and abs(encoded - share * needed) < 1
    # A reward that fails on one process stops all with one message.
    assert first["dead"] == second["dead"] and "6 of 12 images have no reward" in first["dead"]
    assert "the server is gone" in first["dead"]
