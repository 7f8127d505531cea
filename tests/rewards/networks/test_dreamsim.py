"""DreamSim read from a folder of its published files gives what its published code gives."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from flowrl_rewards.networks.likeness import likeness
from published_layout import weights_by_name
from safetensors.torch import save_file

WIDTH, BLOCKS, RANK, ALPHA = 64, 12, 4, 2.0
# Cosines of `pictures()` 0 and 1, 0 and 2, 1 and 2 by dreamsim 0.2.1, with its networks made this
# narrow and the weights of `write`.
THEIRS = (0.9526295065879822, 0.840870201587677, 0.8626747727394104)


def vit(extra: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a vision transformer of the package, but for its width."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 197, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, 16, 16),
        "patch_embed.proj.bias": (WIDTH,),
    }
    for block in (f"blocks.{i}" for i in range(BLOCKS)):
        for name, out, into in (
            ("attn.qkv", 3 * WIDTH, WIDTH), ("attn.proj", WIDTH, WIDTH),
            ("mlp.fc1", 4 * WIDTH, WIDTH), ("mlp.fc2", WIDTH, 4 * WIDTH),
        ):  # fmt: skip
            shapes |= {f"{block}.{name}.weight": (out, into), f"{block}.{name}.bias": (out,)}
        for name in ("norm1", "norm2"):
            shapes |= {f"{block}.{name}.weight": (WIDTH,), f"{block}.{name}.bias": (WIDTH,)}
    return shapes | {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,)} | extra


def write(folder: Path, suffix: str = "safetensors") -> None:
    """The files of the ensemble, with weights by name."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "ensemble_lora").mkdir()
    torch.save(weights_by_name(vit({})), folder / "checkpoints" / "dino_vitbase16_pretrain.pth")
    extra = {"proj": (WIDTH, 32), "pos_drop.weight": (WIDTH,), "pos_drop.bias": (WIDTH,)}
    for name in ("clip_vitb16", "open_clip_vitb16"):
        state = weights_by_name({f"{name}.{key}": shape for key, shape in vit(extra).items()})
        state = {key[len(name) + 1 :]: value for key, value in state.items()}
        state["pos_drop.weight"] = state["pos_drop.weight"] + 1
        torch.save({"state_dict": state}, folder / f"{name}_pretrain.pth.tar")
    adapter = weights_by_name({
        f"base_model.model.extractor_list.{i}.model.blocks.{b}.attn.qkv.lora_{half}.weight": shape
        for i in range(3) for b in range(BLOCKS)
        for half, shape in (("A", (RANK, WIDTH)), ("B", (3 * WIDTH, RANK)))
    })  # fmt: skip
    place = folder / "ensemble_lora" / f"adapter_model.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(adapter, place)
    config = {"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.3, "bias": "none",
              "target_modules": ["qkv"], "peft_type": "LORA"}  # fmt: skip
    (place.parent / "adapter_config.json").write_text(json.dumps(config))


def pictures(random_images) -> torch.Tensor:
    """Of the size that the package looks at."""
    images = random_images(3, 224, 224)
    images[1] = (images[0] + 0.3 * images[1]) / 1.3
    return images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dreamsim") / "models"
    write(folder)
    return folder


def test_it_finds_images_as_alike_as_the_published_code(folder, random_images):
    alike = likeness(f"dreamsim:{folder}", device="cpu").matrix(pictures(random_images))
    assert [alike[0, 1], alike[0, 2], alike[1, 2]] == pytest.approx(THEIRS, abs=2e-5)


@pytest.mark.slow
def test_a_folder_of_other_files_is_one_sentence(folder, tmp_path, random_images):
    images = pictures(random_images)[:1]
    broken = tmp_path / "models"
    measure = likeness(f"dreamsim:{broken}", device="cpu")
    shutil.copytree(folder, broken)
    adapter = broken / "ensemble_lora" / "adapter_model.safetensors"
    save_file({"some.weight": torch.ones(1)}, adapter)
    with pytest.raises(ValueError, match="holds no LoRA of DreamSim's ensemble"):
        measure.features(images)
    shutil.copy(folder / "ensemble_lora" / adapter.name, adapter)
    torch.save({"state_dict": {"a": torch.ones(1)}}, broken / "clip_vitb16_pretrain.pth.tar")
    with pytest.raises(ValueError, match="holds no vision transformer of DreamSim's: it lacks"):
        measure.features(images)
    (broken / "clip_vitb16_pretrain.pth.tar").unlink()
    with pytest.raises(FileNotFoundError, match="holds no file clip_vitb16_pretrain.pth.tar"):
        measure.features(images)
