"""LoRAs of any program: read into one form, equal to what their own library makes of them."""

import dataclasses
import json
import logging
import shutil
import time
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file

from flowrl.backbones import lora_formats
from flowrl.backbones.lora_formats import FILE, METADATA, lora_bytes, open_lora
from flowrl.errors import UserError

BLOCK = "transformer_blocks.0.attn"


@pytest.fixture(scope="module")
def peft_folder(load_tiny, tmp_path_factory):
    """A PEFT folder of the tiny SD3 with ranks and alphas of some layers' own, and its model."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_out.0"],
        rank_pattern={"to_k": 2}, alpha_pattern={"transformer_blocks.1.attn.to_q": 6},
        init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = peft.get_peft_model(load_tiny().transformer, config)
    folder = tmp_path_factory.mktemp("peft")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def copy(peft_folder, tmp_path):
    """A copy of the PEFT folder, and a function that changes entries of its configuration."""
    folder = tmp_path / "copy"
    shutil.copytree(peft_folder[0], folder)
    file = folder / "adapter_config.json"
    saved = json.loads(file.read_text())

    def change(**entries: Any) -> None:
        file.write_text(json.dumps(saved | entries))

    return SimpleNamespace(folder=folder, change=change, file=folder / "adapter_model.safetensors")


def changes(lora) -> dict[str, torch.Tensor]:
    return {name: lora.scales[name] * up @ down for name, (down, up) in lora.layers.items()}


def pair(name: str, scale: float = 1.0, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {
        f"{name}.lora_A.weight": torch.full((2, 3), scale).to(dtype),
        f"{name}.lora_B.weight": torch.full((3, 2), scale).to(dtype),
    }


# --- PEFT's configuration -------------------------------------------------------------------------


def test_a_peft_folder_changes_the_weights_as_peft_does_and_says_so_in_diffusers_file(
    peft_folder, tmp_path
):
    folder, model = peft_folder
    lora, modules = open_lora(folder), dict(model.base_model.model.named_modules())
    assert len(lora.scales) == 6
    assert sorted(set(lora.scales.values())) == [1.5, 2.0, 4.0]  # 6 / 4, 8 / 4, 8 / 2
    for name, change in changes(lora).items():
        delta = modules[name].get_delta_weight("default")
        torch.testing.assert_close(change, delta, rtol=1e-6, atol=1e-7)
    (tmp_path / FILE).write_bytes(lora_bytes(lora))
    again = open_lora(tmp_path)
    assert again.prefix == "transformer." and again.scales == lora.scales
    assert all(torch.equal(t, again.state[name]) for name, t in lora.state.items())


def test_every_field_of_pefts_configuration_is_understood_irrelevant_or_refused(copy):
    """A new field of PEFT is refused; one that it writes with a default of its own fails above."""
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    taken = lora_formats.PlainLoRA.model_fields.keys() | lora_formats.IRRELEVANT
    assert taken < fields and len(fields - taken) > 15
    for name in [*sorted(fields - taken), "a_field_of_tomorrow"]:
        copy.change(**{name: [1]})
        with pytest.raises(UserError, match=f"adapter_config.json has {name} ="):
            open_lora(copy.folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"init_lora_weights": "olora"}, {"bias": "all"}, {"fan_in_fan_out": True}, {"r": 4.0},
        {"rank_pattern": [4]}, *({"lora_alpha": value} for value in ("8", None, 0, float("nan"))),
        {"alpha_pattern": {"([a-z._0-9]+)+!": 2}}, {"use_rslora": 1},
        {"alpha_pattern": {"to_q": -1}},
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_changes_what_numbers_mean_is_refused_by_its_entry(copy, entry):
    copy.change(**entry)
    start = time.monotonic()
    with pytest.raises(UserError, match=f"adapter_config.json has {next(iter(entry))}"):
        open_lora(copy.folder)
    assert time.monotonic() - start < 5
    header = {f"transformer.{k}": v for k, v in ({"r": 2, "lora_alpha": 2} | entry).items()}
    save_file(pair("transformer.a"), copy.folder / FILE, {METADATA: json.dumps(header)})
    with pytest.raises(UserError, match=f"{FILE}, .* has {next(iter(entry))}"):
        open_lora(copy.folder / FILE, alpha=1)


def test_entries_that_change_nothing_are_taken(copy, peft_folder):
    expected = open_lora(peft_folder[0]).scales
    for value in (True, False, "gaussian", "orthogonal"):
        copy.change(init_lora_weights=value, loftq_config={}, modules_to_save=[], lora_dropout=0.1)
        assert open_lora(copy.folder).scales == expected
    copy.change(use_rslora=True)
    assert sorted(set(open_lora(copy.folder).scales.values()))[-1] == pytest.approx(8 / 2**0.5)
    copy.change(r=16)
    with pytest.raises(UserError, match="says rank 16 for"):
        open_lora(copy.folder)


def test_json_that_is_broken_or_nested_without_end_is_one_sentence(copy):
    deep = '{"a":' * 100_000
    for text in ("{no json", deep, "[1]", '{"peft_type": "LOHA"}'):
        (copy.folder / "adapter_config.json").write_text(text)
        with pytest.raises(UserError, match="adapter_config.json"):
            open_lora(copy.folder)
    for text in ("{no json", deep, "[1]"):
        save_file(pair("transformer.a"), copy.folder / FILE, {METADATA: text})
        with pytest.raises(UserError, match=METADATA):
            open_lora(copy.folder / FILE)
    header = deep.encode()
    for data in (len(header).to_bytes(8, "little") + header, b"nothing of the kind", b""):
        (copy.folder / FILE).write_bytes(data)
        with pytest.raises(UserError, match=FILE):
            open_lora(copy.folder / FILE)


# --- tensors --------------------------------------------------------------------------------------


def test_every_type_of_tensors_is_converted_or_refused(tmp_path):
    kinds = {"float16": True, "float64": True, "float8_e4m3fn": True, "int8": False, "bool": False}
    for kind, valid in kinds.items():
        save_file(pair("transformer.a", 0.5, getattr(torch, kind)), tmp_path / FILE)
        if valid:
            assert torch.equal(changes(open_lora(tmp_path))["a"], torch.full((3, 3), 0.5))
        else:
            with pytest.raises(UserError, match=f"{FILE}.*{kind}"):
                open_lora(tmp_path)


def test_tensors_that_are_no_lora_of_one_transformer_are_refused_by_name(tmp_path):
    name, text = f"{BLOCK}.to_q", pair("lora_te1_layers_0_fc1")
    one, inf, nan = pair("transformer.a.b"), float("inf"), float("nan")

    def factors(down, up):
        return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}

    good = factors(torch.ones(4, 8), torch.ones(8, 4))
    alphas = [torch.ones(2), *(torch.tensor(alpha) for alpha in (inf, nan, 0.0, 1j))]
    adapters = {
        key.replace("weight", f"{adapter}.weight"): tensor.clone()
        for adapter in "xy"
        for key, tensor in one.items()
    }
    for tensors, words in (
        (factors(torch.ones(4, 8), torch.ones(8, 3)), BLOCK),
        (factors(torch.ones(4), torch.ones(4)), BLOCK),
        (factors(torch.tensor(1.0), torch.tensor(1.0)), BLOCK),
        (factors(torch.ones(0, 8), torch.ones(8, 0)), BLOCK),
        (good | {f"{BLOCK}.to_k.lora_A.weight": torch.ones(4, 8)}, BLOCK),
        (good | {f"{name}.dora_scale": torch.ones(8)}, BLOCK),
        *((good | {f"{name}.alpha": alpha}, BLOCK) for alpha in alphas),
        *((pair("transformer.a", value), "in transformer.a.lora") for value in (nan, inf)),
        ({"transformer.weight": torch.zeros(2)}, "transformer.weight"),
        (text, "holds no LoRA of a transformer"),
        (one | pair("unet.a.b", 2.0), "two LoRAs"),
        (adapters, "two LoRAs"),
    ):
        save_file(tensors, tmp_path / FILE)
        with pytest.raises(UserError, match=words):
            open_lora(tmp_path)


def test_the_transformers_part_is_taken_of_a_file_that_also_has_a_text_encoders(tmp_path, caplog):
    for text in ("text_encoder.text_model.encoder.layers.0.mlp.fc1", "lora_te1_layers_0_fc1"):
        save_file(pair("transformer.a") | pair(text), tmp_path / FILE)
        caplog.clear()
        assert list(open_lora(tmp_path).scales) == ["a"]
        assert "text encoders" in caplog.text


def test_a_file_without_alpha_warns_unless_it_is_given(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    save_file(pair("a"), tmp_path / FILE)
    assert open_lora(tmp_path).scale == 1 and f"{FILE} has no alpha" in caplog.text
    caplog.clear()
    assert open_lora(tmp_path, alpha=8).scale == 4 and not caplog.text
    save_file(pair("a") | {"a.alpha": torch.tensor(4)}, tmp_path / FILE)
    assert open_lora(tmp_path).scale == 2
    with pytest.raises(UserError, match="was trained with alpha 4, and --lora-alpha is 99"):
        open_lora(tmp_path, alpha=99)
    save_file(pair("a") | pair("b") | {"a.alpha": torch.tensor(4)}, tmp_path / FILE)
    with pytest.raises(UserError, match="none for b"):
        open_lora(tmp_path)


# --- where the file is ----------------------------------------------------------------------------


def test_a_folder_above_the_lora_is_searched_and_several_are_an_error(peft_folder, tmp_path):
    with pytest.raises(UserError, match="no LoRA at"):
        open_lora(tmp_path)
    shutil.copytree(peft_folder[0], tmp_path / "run" / "checkpoint-3" / "lora")
    expected = open_lora(tmp_path / "run" / "checkpoint-3" / "lora").path
    assert open_lora(tmp_path / "run" / "checkpoint-3").path == expected
    assert open_lora(tmp_path / "run").path == expected
    shutil.copytree(peft_folder[0], tmp_path / "run" / "checkpoint-6" / "lora")
    with pytest.raises(UserError, match="name one of checkpoint-3/lora, checkpoint-6/lora in it"):
        open_lora(tmp_path / "run")


def test_a_name_on_the_hub_is_its_folder_there_at_a_revision(
    peft_folder, tmp_path, monkeypatch, capsys
):
    requests = []
    shutil.copytree(peft_folder[0], tmp_path / "checkpoint-3" / "lora")

    def download(name, revision, allow_patterns):
        assert name in capsys.readouterr().err  # said before: without a network it takes a minute
        requests.append((name, revision))
        assert "checkpoint-3/lora/adapter_config.json" in allow_patterns or name != "me/a-lora"
        return str(tmp_path if name == "me/a-lora" else tmp_path / "nothing")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    lora = open_lora("me/a-lora/checkpoint-3@v1")
    assert lora.path == tmp_path / "checkpoint-3" / "lora" / "adapter_model.safetensors"
    assert requests == [("me/a-lora", "v1")]
    with pytest.raises(UserError, match="no LoRA at ../nothing/x"):
        open_lora("../nothing/x")
    with pytest.raises(UserError, match="no LoRA at me/empty"):
        open_lora("me/empty")
