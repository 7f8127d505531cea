"""No byte of a checkpoint, an evaluation or a LoRA changes without being noticed."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from flowrl.api import align
from flowrl.backbones.lora_formats import FILE, open_lora
from flowrl.errors import UserError
from flowrl.training.checkpoint import STATE, read_checkpoint
from flowrl.training.evaluate import Evaluation
from flowrl.utils.digests import check_seal, seal
from flowrl.utils.files import load_state, save_state

SMALL = {"prompts_per_iteration": 1, "group_size": 2, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def kept(tiny_config, tmp_path_factory) -> Path:
    """A folder with a run that has evaluations."""
    folder = tmp_path_factory.mktemp("kept")
    run = {"output_dir": str(folder / "run"), "iterations": 1}
    evaluation = {"prompts": "tiny:colors:test", "num_images": 2, "num_inference_steps": 1}
    align(tiny_config(rollout=SMALL, evaluation=evaluation, run=run))
    return folder


READERS = {
    f"run/checkpoints/step-000001/{STATE}": lambda path: read_checkpoint(path.parent),
    f"run/checkpoints/step-000001/{FILE}": lambda path: read_checkpoint(path.parent),
    f"run/{FILE}": open_lora,
    "run/evaluations/step-000000.safetensors": Evaluation.load,
}


def flips(kept: Path, name: str, count: int):
    """Changed bytes of a file: half of them in the first kilobyte, where headers are."""
    data = (kept / name).read_bytes()
    choice = random.Random(name)
    for number in range(count):
        place = choice.randrange(min(len(data), 1024) if number % 2 else len(data))
        value = choice.choice([v for v in range(256) if v != data[place]])
        yield data[:place] + bytes([value]) + data[place + 1 :]


def test_a_changed_byte_is_refused_by_name_wherever_it_is(kept, tmp_path):
    for name, read in READERS.items():
        root = Path(shutil.copytree(kept / name.partition("/")[0], tmp_path / name / "copy"))
        path = root / name.partition("/")[2]
        whole = path.read_bytes()
        for changed in flips(kept, name, 6):
            path.write_bytes(changed)
            with pytest.raises(UserError, match=str(path)):
                read(path)
        path.write_bytes(whole)
        read(path)


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
