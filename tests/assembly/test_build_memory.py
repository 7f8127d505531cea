"""The options under `memory` in whole runs: the same LoRA, whatever stays where."""

import logging
import weakref

import pytest
import torch

from flowrl.api import align, encode
from flowrl.assembly import backbone as build_memory
from flowrl.assembly import text
from flowrl.assembly.backbone import build_pipeline
from flowrl.assembly.learner import (
    ProvidedObjects,
    build_learner,
)
from flowrl.assembly.text import prompts_to_encode
from flowrl.backbones.lora_formats import open_lora
from flowrl.backbones.offload import ENCODER, are_freed, encoders_of
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.utils.distributed import Runtime

CPU = torch.device("cpu")
EVALUATION = {
    "prompts": "tiny:geneval:test",
    "num_images": 2,
    "num_inference_steps": 2,
    "batch_size": 2,
}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "train.txt"
    path.write_text("a red circle\na blue square\na green triangle\n")
    return {"train": str(path)}


@pytest.fixture(scope="module")
def run(tiny_config, prompts, tmp_path_factory):
    """Train one iteration with these options -> the LoRA's tensors."""

    def train(guidance=3.0, **memory):
        folder = tmp_path_factory.mktemp("runs") / "run"
        config = tiny_config(
            memory=memory,
            prompts=prompts,
            rollout={
                "prompts_per_iteration": 3,
                "group_size": 2,
                "num_inference_steps": 2,
                "guidance_scale": guidance,
            },
            evaluation=EVALUATION,
            run={"iterations": 1, "output_dir": str(folder)},
        )
        assert align(config)
        assert (folder / "README.md").is_file() and (folder / "gallery" / "index.html").is_file()
        return open_lora(folder).state

    return train


@pytest.fixture
def loads(monkeypatch):
    found, original = [], build_memory.load_pipeline

    def load(path, **options):
        parts = options["parts"] or {}
        found.append([name for name, part in parts.items() if part is None and ENCODER in name])
        return original(path, **options)

    monkeypatch.setattr(build_memory, "load_pipeline", load)
    return found


def test_freed_and_cached_prompts_give_the_same_lora(run, loads, monkeypatch, tmp_path):
    kept = run()
    watched, free = [], text.free_encoders

    def watch(pipeline):
        watched.extend(weakref.ref(part) for part in encoders_of(pipeline))
        free(pipeline)
        assert are_freed(pipeline) and all(ref() is None for ref in watched)

    monkeypatch.setattr(text, "free_encoders", watch)
    options = {"text_encoders": "free", "vae": "offload", "prompt_cache": str(tmp_path)}
    assert same(run(**options), kept)
    assert len(watched) == 3
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5  # 3 prompts guided, 2 not
    assert same(run(**options), kept)
    encoders = ["text_encoder", "text_encoder_2", "text_encoder_3"]
    # Kept; first for the encoders, then without them; all on disk.
    assert loads == [[], [], encoders, encoders]
    assert len(watched) == 3  # none was there the second time


def test_prompts_that_a_run_may_ask_for_are_needed(tiny_config):
    many = [PromptRecord(uid=str(i), text=str(i)) for i in range(50)]
    config = tiny_config(rollout={"prompts_per_iteration": 3}, run={"iterations": 4})
    sampler = PromptSampler(many, 3, config.run.seed)
    taken = {p.uid for i in range(4) for p in sampler.at(i)}
    assert {p.uid for _, p in prompts_to_encode(config, many, [])} == taken and len(taken) == 12
    left = {p.uid for i in (2, 3) for p in sampler.at(i)}
    assert {p.uid for _, p in prompts_to_encode(config, many, [], range(2, 4))} == left
    kinds = [PromptRecord(uid=k, text=k, metadata={"tag": k}) for k in "ab"]
    weighed = tiny_config(prompts={"balance": "tag", "weights": {"a": 0}})
    assert {p.text for _, p in prompts_to_encode(weighed, kinds, [])} == {"b"}
    own = {"train": "tiny:colors+counting:train", "balance": "tag", "weights": {"colors": 0}}
    learner = build_learner(tiny_config(prompts=own), Runtime(device="cpu"), ProvidedObjects())
    sampled = [p for i in range(3) for p in learner.source.prompts.at(i)]
    assert {p.metadata["tag"] for p in sampled} == {"counting"}
    prompt, held = (PromptRecord(uid=name, text=name) for name in "ah")
    guided = tiny_config(rollout={"guidance_scale": 2.0})
    assert prompts_to_encode(guided, [prompt], [held]) == [(2.0, prompt), (1.0, held)]


def test_options_of_memory_are_set_on_the_pipeline(tiny_config, load_tiny, caplog):
    config = tiny_config(memory={"vae": "offload"})
    with caplog.at_level(logging.WARNING):
        build_pipeline(config, CPU, load_tiny())
        assert not caplog.text
        build_pipeline(config, CPU, load_tiny(), decoder_learns=True)
    assert "memory.vae is offload, but" in caplog.text and "stays on the device" in caplog.text
    config = tiny_config(memory={"gradient_checkpointing": True}, pipeline={"attention": "native"})
    assert build_pipeline(config, CPU, load_tiny()).transformer.gradient_checkpointing
    config = tiny_config(pipeline={"attention": "no-such"})
    with pytest.raises(UserError, match="pipeline.attention is 'no-such'"):
        build_pipeline(config, CPU, load_tiny())


def test_prompts_are_encoded_ahead_of_a_run_which_then_loads_no_encoder(
    tiny_config, prompts, tmp_path, loads
):
    memory = {"text_encoders": "free", "prompt_cache": str(tmp_path / "texts")}
    rollout = {"prompts_per_iteration": 3, "group_size": 2, "num_inference_steps": 2}
    config = tiny_config(memory=memory, prompts=prompts, rollout=rollout, run={"iterations": 1})
    assert encode(config) == [{"prompts": 3, "encoded": 3}]
    assert encode(config) == [{"prompts": 3, "encoded": 0}]
    assert len(list((tmp_path / "texts").rglob("*.safetensors"))) == 3
    loads.clear()
    build_learner(config, Runtime(device="cpu"), ProvidedObjects())
    assert loads == [["text_encoder", "text_encoder_2", "text_encoder_3"]]
    with pytest.raises(UserError, match="memory.prompt_cache is null, so there is nowhere"):
        encode(tiny_config())
