"""Networks as large as FLUX.2 and Qwen-Image on eight GPUs of 80 GB, planned in parts.

They are FLUX.1's classes at those widths and depths, beside the text encoders of their size.
"""

import json
from pathlib import Path

import pytest

from flowrl.config import load_config
from flowrl.planning.model_specs import MODEL_SPECS
from flowrl.planning.plan import make_plan

GB = 10**9
# Of Mistral Small 3 (24 B) and of Qwen2.5-VL's language model (7 B), as published.
MISTRAL = {
    "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40,
    "intermediate_size": 32768, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 131072,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064,
}  # fmt: skip
FLUX2 = {
    "num_layers": 8, "num_single_layers": 37, "num_attention_heads": 48,
    "joint_attention_dim": 15360,
}  # fmt: skip
QWEN_IMAGE = {"num_layers": 60, "num_single_layers": 0, "joint_attention_dim": 3584}


def written(folder: Path, changes: dict, encoder: str, config: dict) -> Path:
    """A pipeline's folder without weights: FLUX.1's, but for its size and its text encoder."""
    spec = MODEL_SPECS["flux.1-dev"]
    parts = {
        "transformer": ("diffusers", spec.transformer, {**spec.config, **changes}),
        "vae": ("diffusers", spec.autoencoder, spec.autoencoder_config),
        "scheduler": ("diffusers", spec.scheduler, spec.scheduler_config),
        "text_encoder": ("transformers", encoder, config),
    }
    index = {name: [library, kind] for name, (library, kind, _) in parts.items()}
    for name, (_, _, its) in parts.items():
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text(json.dumps(dict(its)))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": spec.pipeline, **index}))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name, network, text",
    [
        ("flux.2", FLUX2 | {}, ("MistralModel", MISTRAL)),
        ("qwen-image", QWEN_IMAGE, ("Qwen2Model", QWEN)),
    ],
)
def test_a_network_in_parts_fits_eight_gpus_that_do_not_hold_it_whole(
    tmp_path, name, network, text
):
    folder = written(tmp_path / name, network, *text)
    changes = [f"pipeline.path={folder}", "memory.text_encoders=free", "optim.micro_batch=4"]
    changes += ["rollout.batch_size=8", "lora.rank=32", "lora.alpha=64"]
    plans = {
        shard: make_plan(
            load_config("flux.1-dev-grpo-80gb", [*changes, f"runtime.shard={shard}"]),
            gpus=8, memory=80 * GB,
        )
        for shard in ("null", "node")
    }  # fmt: skip
    whole, parts = plans["null"], plans["node"]
    weights: dict[str, int] = {}
    for shard, plan in plans.items():
        assert plan.peak is not None and plan.host is not None
        weights[shard] = plan.peak.parts["transformer"]
        rows = {p.phase: f"{p.total / GB:.1f}" for p in plan.phases}
        print(name, shard, f"{weights[shard] / GB:.1f}", rows, f"{plan.host / GB:.0f}", plan.fits)
    size = {"flux.2": 32e9, "qwen-image": 20e9}[name]
    assert weights["null"] == pytest.approx(2 * size, rel=0.05)
    assert parts.fits and not whole.fits if name == "flux.2" else parts.fits
    assert weights["node"] < weights["null"] / 4
    # One copy of the network in the machine's memory in place of eight; the encoders stay eight.
    hosts = [plan.host or 0 for plan in (whole, parts)]
    assert hosts[0] - hosts[1] == pytest.approx(7 * weights["null"], rel=0.01)
