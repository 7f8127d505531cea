"""Networks of the real architectures, a thousandth of their size and with random weights."""

from pathlib import Path

import pytest
import torch
from published_layout import save_aesthetic, save_hpsv3

SIDE = 32  # of the images that the tiny networks read
ENDS = ("bos", "eos", "pad")


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a CLIP of transformers and its tokenizer; 14 tokens, logit scale 100."""
    from transformers import CLIPConfig, CLIPModel

    from scripts.pretrain_tiny.vocab import CLIP_TOKENS, clip_tokenizer

    folder = tmp_path_factory.mktemp("clip")
    tokenizer = clip_tokenizer(folder)
    size = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "projection_dim": 768,
    }  # fmt: skip
    ends = {f"{end}_token_id": getattr(tokenizer, f"{end}_token_id") for end in ENDS}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": CLIP_TOKENS}
    config = CLIPConfig(
        text_config=size | text | ends, vision_config=size | {"image_size": SIDE, "patch_size": 8},
        projection_dim=768, logit_scale_init_value=4.6052,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIPModel(config)
        _spread(model)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_hps(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The name of an architecture that open_clip knows, and a checkpoint of it."""
    import json

    import open_clip

    folder = tmp_path_factory.mktemp("hps")
    tower = {"layers": 2, "width": 32}
    config = {
        "embed_dim": 16,
        "vision_cfg": tower | {"image_size": SIDE, "patch_size": 8, "head_width": 8},
        "text_cfg": tower | {"context_length": 77, "vocab_size": 49408, "heads": 4},
    }
    (folder / "tiny-hps.json").write_text(json.dumps(config))
    open_clip.add_model_config(Path(folder))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = open_clip.CLIP(**config)
        _spread(model)
    torch.save({"state_dict": model.state_dict()}, folder / "HPS_v2.1_compressed.pt")
    return "tiny-hps", str(folder)


@pytest.fixture(scope="session")
def tiny_hpsv3(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hpsv3")
    save_hpsv3(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_aesthetic(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("aesthetic")
    save_aesthetic(folder)
    return str(folder)


def _spread(model: torch.nn.Module) -> None:
    """Random weights hardly look at their input; a larger spread makes them."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)


@pytest.fixture(scope="session")
def random_images():
    """(count, 3, height, width), multiples of 1/255, within [0.2, 0.8]: nothing is clipped."""

    def make(count: int, height: int = SIDE, width: int = SIDE) -> torch.Tensor:
        generator = torch.Generator().manual_seed(count * height * width)
        levels = torch.randint(51, 205, (count, 3, height, width), generator=generator)
        return levels.float() / 255

    return make
