"""No byte of a checkpoint, a data set, an evaluation or a LoRA changes without being noticed."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from flowrl.api import align, collect
from flowrl.backbones.lora_formats import FILE, open_lora
from flowrl.errors import UserError
from flowrl.offline.format import open_dataset
from flowrl.training.checkpoint import STATE, read_checkpoint
from flowrl.training.evaluate import Evaluation
from flowrl.utils.digests import check_seal, seal
from flowrl.utils.files import load_state, save_state

SMALL = {"prompts_per_iteration": 1, "group_size": 2, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def kept(tiny_config, tmp_path_factory) -> Path:
    """A folder with a run that has evaluations, and a data set."""
    folder = tmp_path_factory.mktemp("kept")
    run = {"output_dir": str(folder / "run"), "iterations": 1}
    evaluation = {"prompts": "tiny:colors:test", "num_images": 2, "num_inference_steps": 1}
    config = tiny_config(rollout=SMALL, evaluation=evaluation, run=run)
    align(config)
    collect(config, folder / "store", groups=1)
    return folder


def read_store(path: Path):
    """Everything that training reads."""
    store = open_dataset(path.parent if path.name == "store.json" else path.parents[1])
    groups = [(group.key, group.record, group.images) for group in store.groups]
    latents = store.latents(torch.arange(len(store)))
    return groups, store.metadata, store.scores.tolist(), latents.tolist()


READERS = {
    f"run/checkpoints/step-000001/{STATE}": lambda path: read_checkpoint(path.parent),
    f"run/checkpoints/step-000001/{FILE}": lambda path: read_checkpoint(path.parent),
    f"run/{FILE}": open_lora,
    "run/evaluations/step-000000.safetensors": Evaluation.load,
    "store/store.json": read_store,
    "store/shards/000000.safetensors": read_store,
}


def parsed(data: bytes):
    return [json.loads(line) for line in data.split(b"\n") if line]


def flips(kept: Path, name: str, count: int):
    """Changed bytes of a file: half of them in the first kilobyte, where headers are."""
    data = (kept / name).read_bytes()
    choice = random.Random(name)
    for number in range(count):
        place = choice.randrange(min(len(data), 1024) if number % 2 else len(data))
        value = choice.choice([v for v in range(256) if v != data[place]])
        yield data, data[:place] + bytes([value]) + data[place + 1 :]


def check_flips(kept: Path, tmp_path: Path, count: int) -> None:
    for name, read in READERS.items():
        root = Path(shutil.copytree(kept / name.partition("/")[0], tmp_path / name / "copy"))
        path = root / name.partition("/")[2]
        before = read(path) if path.suffix in (".json", ".jsonl") else None
        for data, changed in flips(kept, name, count):
            path.write_bytes(changed)
            try:
                found = read(path)
            except UserError as error:
                shard = f"shard 0 of {root}"
                assert str(path) in str(error) or shard in str(error), error
                continue
            # White space and escapes of texts may change, what they say may not.
            whole = path.suffix == ".json"
            assert before is not None and found == before
            assert (
                json.loads(changed) == json.loads(data)
                if whole
                else parsed(changed) == parsed(data)
            )
        path.write_bytes(data)
        read(path)


def test_a_changed_byte_is_refused_by_name_wherever_it_is(kept, tmp_path):
    check_flips(kept, tmp_path, 6)


def test_a_damaged_evaluation_is_made_again(kept, tiny_config, tmp_path, caplog):
    folder = Path(shutil.copytree(kept / "run", tmp_path / "run"))
    path = folder / "evaluations" / "step-000000.safetensors"
    whole = Evaluation.load(path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    evaluation = {"prompts": "tiny:colors:test", "num_images": 2, "num_inference_steps": 1}
    run = {"output_dir": str(folder), "iterations": 1}
    align(tiny_config(rollout=SMALL, evaluation=evaluation, run=run), resume="latest")
    assert f"{path} is damaged" in caplog.text
    again = Evaluation.load(path)
    assert torch.equal(again.scores, whole.scores) and torch.equal(again.images, whole.images)


def test_the_seal_is_a_function_of_the_content_and_can_be_renewed(tmp_path):
    save_state(tmp_path / "s", {"a": torch.ones(3), "text": '"flowrl_digest":"' + "0" * 32})
    data = (tmp_path / "s").read_bytes()
    assert check_seal(data, tmp_path / "s") and seal(data) == data
    assert load_state(tmp_path / "s")["text"].startswith('"flowrl_digest')
