"""The model card is read by the Hub, by people, and by Python."""

import re
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from flowrl.backbones.lora_files import save_lora
from flowrl.backbones.small import small_folder
from flowrl.export.gallery import GalleryRow
from flowrl.export.hub import licence_of, public_card
from flowrl.export.model_card import Card, loader_of, write_card
from flowrl.functional.contrasts import Contrast
from flowrl.training.evaluate import EvaluationComparison

HOSTILE = 'a: "cat" --- \n---\nlicense: mit\n``` <b>| [x](http://example.com) {{ 7*7 }} \'#'


CHANGE = Contrast(mean=0.14, low=0.1, high=0.18, p=0.01, images=9, prompts=9)


def pair(prompt: str) -> GalleryRow:
    images = tuple(Image.new("RGB", (64, 64), color) for color in ("white", "black"))
    return GalleryRow(prompt=prompt, images=images, scores={"ocr": (0, 1)})


def card(**changes: Any) -> Card:
    values: dict[str, Any] = {
        "base_model": "stabilityai/stable-diffusion-3.5-medium",
        "on_hub": True,
        "load_from": "'stabilityai/stable-diffusion-3.5-medium'",
        "call": {"num_inference_steps": 8, "guidance_scale": 1.0},
        "license": {"license": "apache-2.0"},
        "method": "Flow-GRPO",
        "weights": "EMA",
        "step": 240,
        "command": "flowrl train quickstart",
        "config": "rollout:\n  steps: 8\n",
        "evaluation": "600 images of unseen prompts",
        "summary": [EvaluationComparison(name="ocr|x", before=0.48, after=0.62, change=CHANGE)],
        "curves": {"reward/mean": [(1, 0.5), (2, 0.6)], "reward/ocr": []},
        "rows": [pair("a red circle"), pair(HOSTILE)],
    }
    return Card(**(values | changes))


def parts(folder, made: Card) -> tuple[dict[str, Any], str]:
    text = write_card(folder, made).read_text("utf-8")
    _, header, body = re.split(r"^---\n", text, maxsplit=2, flags=re.MULTILINE)
    return yaml.safe_load(header), body


def code_blocks(body: str, language: str) -> list[str]:
    found = re.findall(rf"^(`{{3,}}){language}\n(.*?)^\1$", body, re.MULTILINE | re.DOTALL)
    return [text for _, text in found]


def test_the_front_matter_is_what_the_hub_reads(tmp_path):
    header, body = parts(tmp_path, card())
    tags = {"text-to-image", "diffusers", "lora", "template:sd-lora", "reinforcement-learning"}
    assert set(header["tags"]) == tags
    assert header["base_model"] == "stabilityai/stable-diffusion-3.5-medium"
    assert header["license"] == "apache-2.0"
    assert [w["text"] for w in header["widget"]] == ["a red circle", HOSTILE]
    hub = pytest.importorskip("huggingface_hub")
    assert hub.ModelCard.load(tmp_path / "README.md").data.widget
    # Every image that the card shows lies beside it, and is large enough for the Hub.
    shown = re.findall(r"\]\((.*?)\)|src(?:set)?=\"(.*?)\"", body)
    shown = ["".join(names) for names in shown] + [w["output"]["url"] for w in header["widget"]]
    assert len(shown) == 4
    for name in shown:
        with Image.open(tmp_path / name) as image:
            assert min(image.size) >= 256


@pytest.mark.parametrize(
    "name", ["StableDiffusion3Pipeline", "Flux2KleinPipeline", "LongCatImagePipeline",
             "PRXPipeline"],
)  # fmt: skip
def test_the_code_runs_and_draws_the_loras_image(name, tmp_path, monkeypatch):
    import diffusers
    from peft import LoraConfig, inject_adapter_in_model

    monkeypatch.chdir(tmp_path)
    base = small_folder(getattr(diffusers, name), tmp_path / "base")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(base)
    network = pipeline.transformer
    layers = [
        n for n, m in network.named_modules() if isinstance(m, torch.nn.Linear) and ".0." in n
    ]
    config = LoraConfig(r=2, lora_alpha=3, target_modules=layers[-6:], init_lora_weights=False)
    inject_adapter_in_model(config, network)
    folder = tmp_path / "runs" / "it's"
    save_lora(pipeline, folder, adapter="default")
    call = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "np"}
    if "Cat" in name:
        call["enable_prompt_rewrite"] = False  # which samples text
    made = card(load_from="'base'", call=call, rows=[pair("a 'red' circle")], curves={},
                loader=loader_of(pipeline))  # fmt: skip
    (code,) = code_blocks(parts(folder, made)[1], "python")
    drawn: dict[str, Any] = {}
    loading, drawing = code.rstrip().rsplit("\n", 1)
    exec(loading, drawn)
    torch.manual_seed(0)  # loading draws random numbers
    exec(drawing, drawn)
    torch.manual_seed(0)
    expected = pipeline(prompt="a 'red' circle", **call).images[0]
    assert abs(drawn["image"] - expected).max() < 1e-4
    # After an upload the repository takes the folder's place.
    (public,) = code_blocks(public_card((folder / "README.md").read_text(), "me/mine"), "python")
    assert public == code.replace(repr("runs/it's"), "'me/mine'") != code


def test_scores_stand_in_a_table_that_a_reward_name_cannot_break(tmp_path):
    _, body = parts(tmp_path, card())
    (row,) = [line for line in body.splitlines() if line.startswith("| ocr")]
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert cells == ["ocr\\|x", "0.480", "0.620", "+0.140", "+0.100 to +0.180"]


FLUX = "black-forest-labs/FLUX.1-dev"
PLAIN: dict[str, Any] = {"rows": (), "curves": {}}  # images take time


def test_the_licence_is_that_of_the_base(tmp_path):
    for base, name in (
        (FLUX, "flux-1-dev-non-commercial-license"),
        ("stabilityai/stable-diffusion-3.5-medium", "stabilityai-ai-community"),
        ("Efficient-Large-Model/Sana_1600M_1024px_diffusers", "nscl-v2-custom"),
    ):
        header, body = parts(tmp_path, card(base_model=base, license=licence_of(base), **PLAIN))
        assert (header["license"], header["license_name"]) == ("other", name)
        assert header["license_link"].startswith(f"https://huggingface.co/{base}/blob/main/LICENSE")
        assert f"]({header['license_link']}), as the base model." in body
    assert licence_of("me/mine") == licence_of("tiny-sd3") == {}
    assert licence_of("black-forest-labs/FLUX.1-schnell") == {"license": "apache-2.0"}
    unknown = card(on_hub=False, base_model="tiny-sd3", license={}, **PLAIN)
    header, body = parts(tmp_path, unknown)
    assert not {"base_model", "base_model_relation", "license"} & set(header)
    assert "tiny-sd3" in body and "The base model's licence holds for this LoRA too." in body


def test_a_card_without_images_names_none_and_a_configuration_cannot_leave_its_block(tmp_path):
    config = "rollout:\n  negative: |\n````\n# not a heading\n"
    header, body = parts(tmp_path, card(config=config, summary=[], curves={}, rows=[]))
    assert "widget" not in header and "![" not in body and not (tmp_path / "card").exists()
    assert code_blocks(body, "yaml") == [config]
