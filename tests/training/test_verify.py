"""Damage: no byte of a run, a data set or a LoRA changes without being noticed and named."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowrl.api import align, collect
from flowrl.backbones.lora_formats import FILE, open_lora
from flowrl.backbones.policy import POLICY
from flowrl.errors import UserError
from flowrl.offline.format import shard_file
from flowrl.training.checkpoint import STATE, Checkpoints, read_checkpoint
from flowrl.training.evaluate import Evaluation
from flowrl.training.verify import verify
from flowrl.utils.digests import SEAL, check_seal, seal
from flowrl.utils.files import load_state, save_state


def problems(results):
    return {result.topic for result in results if result.state == "problem"}


@pytest.fixture(scope="module")
def finished(tiny_config, load_tiny, tmp_path_factory):
    """A run of three iterations with an evaluation, and checkpoints of the last two."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    align(config_for(tiny_config, folder), pipeline=load_tiny())
    return folder


def config_for(tiny_config, folder):
    return tiny_config(
        run={"iterations": 3, "checkpoint_every": 1, "output_dir": str(folder)},
        evaluation={"prompts": "tiny:colors:test", "num_images": 4, "num_inference_steps": 2},
    )


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def newest(run):
    checkpoints = Checkpoints(run, keep=1)
    return checkpoints.path(checkpoints.steps()[-1]) / STATE


def rewrite(path, change):
    """Write a LoRA again with other tensors, and without a digest."""
    tensors = load_file(path)
    change(tensors)
    with safe_open(path, "pt") as file:
        header = {k: v for k, v in file.metadata().items() if k != SEAL}
    save_file(tensors, path, metadata=header)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def nan_in_lora(run):
    rewrite(run / FILE, lambda tensors: next(iter(tensors.values())).view(-1)[:1].fill_(torch.nan))


def flipped_bit_in_checkpoint(run):
    flip(newest(run), -100)


def truncated_evaluation(run):
    path = sorted(run.glob("evaluations/*"))[0]
    path.write_bytes(path.read_bytes()[:100])


def another_lora(run):
    shutil.copy(sorted(run.glob(f"checkpoints/*/{FILE}"))[0], run / FILE)


def changed_adapter(run):
    """In every checkpoint, and the LoRA too: only the ledger can tell."""
    for path in run.glob(f"checkpoints/*/{STATE}"):
        state = load_state(path)
        for tensor in state["policy"]["adapters"][POLICY]:
            tensor.mul_(1.5)
        save_state(path, state)
    rewrite(run / FILE, lambda tensors: [t.mul_(1.5) for t in tensors.values()])


@pytest.mark.parametrize(
    ("fault", "topic"),
    [
        (nan_in_lora, "lora"), (another_lora, "ledger"), (flipped_bit_in_checkpoint, "step-000003"),
        (truncated_evaluation, "evaluation"), (changed_adapter, "ledger"),
    ],
)  # fmt: skip
def test_a_fault_of_a_run_is_named(fault, topic, run):
    fault(run)
    assert topic in problems(verify(run))


def test_a_good_run_passes(run):
    results = list(verify(run))
    assert results and {r.topic for r in results if r.state != "ok"} == set()


def test_a_fault_of_a_store_is_named_and_a_good_one_passes(tiny_config, load_tiny, tmp_path):
    store = tmp_path / "store"
    collect(tiny_config(), store, groups=2, pipeline=load_tiny())
    assert problems(verify(store)) == set()
    flip(shard_file(store, 0), -7)
    assert problems(verify(store)) == {"store"}


def test_the_command_names_what_is_wrong_and_exits_with_1(run, tmp_path, flowrl):
    code, out, _ = flowrl("verify", run / FILE)
    assert code == 0 and "rank 4, scale 1.5" in out
    nan_in_lora(run)
    code, out, err = flowrl("verify", run / FILE)
    assert code == 1 and "lora" in err and "!!  lora" in out
    assert str(tmp_path) in flowrl("verify", tmp_path)[2]


READERS = {
    f"checkpoints/step-000003/{STATE}": lambda path: read_checkpoint(path.parent),
    f"checkpoints/step-000003/{FILE}": lambda path: read_checkpoint(path.parent),
    FILE: open_lora,
    "evaluations/step-000000.safetensors": Evaluation.load,
}


def flips(data: bytes, name: str, count: int):
    """Changed bytes of a file: half of them in the first kilobyte, where headers are."""
    choice = random.Random(name)
    for number in range(count):
        place = choice.randrange(min(len(data), 1024) if number % 2 else len(data))
        value = choice.choice([v for v in range(256) if v != data[place]])
        yield data[:place] + bytes([value]) + data[place + 1 :]


def test_a_changed_byte_is_refused_by_name_wherever_it_is(run):
    for name, read in READERS.items():
        path = run / name
        whole = path.read_bytes()
        for changed in flips(whole, name, 6):
            path.write_bytes(changed)
            with pytest.raises(UserError, match=str(path)):
                read(path)
        path.write_bytes(whole)
        read(path)


def test_a_damaged_evaluation_is_made_again(run, tiny_config, load_tiny, caplog):
    path = run / "evaluations" / "step-000000.safetensors"
    whole = Evaluation.load(path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    align(config_for(tiny_config, run), pipeline=load_tiny(), resume="latest")
    assert f"{path} is damaged" in caplog.text
    again = Evaluation.load(path)
    assert torch.equal(again.scores, whole.scores) and torch.equal(again.images, whole.images)


def test_the_seal_is_a_function_of_the_content_and_can_be_renewed(tmp_path):
    save_state(tmp_path / "s", {"a": torch.ones(3), "text": '"flowrl_digest":"' + "0" * 32})
    data = (tmp_path / "s").read_bytes()
    assert check_seal(data, tmp_path / "s") and seal(data) == data
    assert load_state(tmp_path / "s")["text"].startswith('"flowrl_digest')
