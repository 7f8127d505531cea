"""A pipeline that the caller gave computes as torch, diffusers and PEFT do once a command ends."""

import pytest

from flowrl import api
from flowrl.assembly import learner as build
from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.backbones import cpu_layers, policy
from flowrl.config import config_yaml
from flowrl.utils.distributed import Runtime
from flowrl.verify.recipe import verify_recipe


def collect(config, folder, pipeline):
    api.collect(config, folder / "store", groups=1, pipeline=pipeline)


def audit(config, folder, pipeline):
    (folder / "recipe.yaml").write_text(config_yaml(config))
    api.audit(folder / "recipe.yaml", prompts=1, candidates=4, steps=[2], pipeline=pipeline)


def signal(config, folder, pipeline):
    api.signal(config, rollouts=2, pipeline=pipeline)


def verify(config, folder, pipeline):
    list(verify_recipe(config, parts=["rewards"], pipeline=pipeline))


@pytest.fixture
def fused(monkeypatch):
    """The networks whose layers were fused."""
    networks = []

    def fuse(network):
        networks.append(network)
        cpu_layers.fuse_layers(network)
        assert cpu_layers.restore_layers(network)
        cpu_layers.fuse_layers(network)

    monkeypatch.setattr(policy, "fuse_layers", fuse)
    return networks


@pytest.mark.parametrize("command", [collect, audit, signal, verify])
def test_its_layers_are_ordinary_after(command, tiny_config, load_tiny, tmp_path, fused):
    rollout = {"prompts_per_iteration": 1, "num_inference_steps": 2}
    config = tiny_config(rollout=rollout, run={"output_dir": str(tmp_path / "run")})
    pipeline = load_tiny()
    command(config, tmp_path, pipeline)
    assert fused == [pipeline.transformer]
    assert not cpu_layers.restore_layers(pipeline.transformer)


def test_they_are_after_an_error_while_a_learner_is_built(
    tiny_config, load_tiny, monkeypatch, fused
):
    def broken(*args):
        raise ValueError("broken")

    monkeypatch.setattr(build, "build_source", broken)
    pipeline = load_tiny()
    with pytest.raises(ValueError, match="broken"):
        build_learner(tiny_config(), Runtime(device="cpu"), ProvidedObjects(pipeline=pipeline))
    assert fused == [pipeline.transformer]
    assert not cpu_layers.restore_layers(pipeline.transformer)
