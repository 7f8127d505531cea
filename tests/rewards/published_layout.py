"""Weights in published layouts that are the same everywhere: by name and place, never by a seed.

Scores of published code for such weights are recorded in the tests: what is read and computed here
must give them too.
"""

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def numbers(name: str, shape: tuple[int, ...], gain: float = 1.5) -> Tensor:
    """Numbers that look random. Norms are near 1 and 0, other biases small."""
    count = torch.Size(shape).numel()
    mixed = torch.arange(count, dtype=torch.int64) + zlib.crc32(name.encode())
    for factor in (2654435761, 2246822519):  # Knuth's and xxHash's
        mixed = (mixed * factor) % 2**32
        mixed = mixed ^ (mixed >> 15)
    uniform = (mixed.double() / 2**31 - 1).view(shape)
    norm = "norm" in name.lower() or ".ln_" in name or name.startswith("ln_")
    if norm and name.endswith("weight"):
        return (1 + 0.2 * uniform).float()
    if norm or len(shape) < 2:
        return (0.2 * uniform).float()
    return (uniform * gain * (3 / torch.Size(shape[1:]).numel()) ** 0.5).float()


# --- HPSv3 ----------------------------------------------------------------------------------------

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>",
)  # fmt: skip
REWARD = 256 + len(SPECIAL)  # the number of its own token: the last one
BASE = {  # as Qwen2-VL-7B's config.json, with the sizes of a toy
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
    "vocab_size": 280, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "bos_token_id": 256, "eos_token_id": 258, "image_token_id": 261, "video_token_id": 279,
    "vision_start_token_id": 259, "vision_end_token_id": 260,
    "vision_config": {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "in_chans": 3, "mlp_ratio": 4,
        "model_type": "qwen2_vl", "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "temporal_patch_size": 2,
    },
}  # fmt: skip
QUESTION = '''
import package_that_is_not_there
INSTRUCTION = """
Rate it.
Textual prompt - {text_prompt}
"""
prompt_with_special_token = """
Rating: <|Reward|>
END
"""
'''


def hpsv3_shapes(text: dict, vision: dict, words: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of HPSv3.safetensors for given sizes."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int, bias: bool = True) -> None:
        shapes.update({f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {}))

    def norm(name: str, size: int) -> None:
        shapes.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    width, side = vision["embed_dim"], vision["patch_size"]
    shapes["visual.patch_embed.proj.weight"] = (width, 3, 2, side, side)
    for block in (f"visual.blocks.{i}" for i in range(vision["depth"])):
        norm(f"{block}.norm1", width)
        norm(f"{block}.norm2", width)
        linear(f"{block}.attn.qkv", 3 * width, width)
        linear(f"{block}.attn.proj", width, width)
        linear(f"{block}.mlp.fc1", 4 * width, width)
        linear(f"{block}.mlp.fc2", width, 4 * width)
    norm("visual.merger.ln_q", width)
    linear("visual.merger.mlp.0", 4 * width, 4 * width)
    linear("visual.merger.mlp.2", text["hidden_size"], 4 * width)
    size, between = text["hidden_size"], text["intermediate_size"]
    shared = size // text["num_attention_heads"] * text["num_key_value_heads"]
    shapes["model.embed_tokens.weight"] = (words, size)
    for layer in (f"model.layers.{i}" for i in range(text["num_hidden_layers"])):
        linear(f"{layer}.self_attn.q_proj", size, size)
        linear(f"{layer}.self_attn.k_proj", shared, size)
        linear(f"{layer}.self_attn.v_proj", shared, size)
        linear(f"{layer}.self_attn.o_proj", size, size, bias=False)
        linear(f"{layer}.mlp.gate_proj", between, size, bias=False)
        linear(f"{layer}.mlp.up_proj", between, size, bias=False)
        linear(f"{layer}.mlp.down_proj", size, between, bias=False)
        shapes[f"{layer}.input_layernorm.weight"] = (size,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (size,)
    shapes["model.norm.weight"] = (size,)
    shapes["lm_head.weight"] = (words, size)
    for number, out, into in ((0, 1024, size), (3, 16, 1024), (5, 2, 16)):
        linear(f"rm_head.{number}", out, into)
    return shapes


def save_hpsv3(folder: Path) -> None:
    """Save the file, the base's sizes and tokenizer (bytes), and the package's source."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token=SPECIAL[0], additional_special_tokens=[*SPECIAL[1:]]
    )
    tokenizer.save_pretrained(folder)
    shapes = hpsv3_shapes(BASE, BASE["vision_config"], REWARD + 1)
    weights = {name: numbers(name, shape) for name, shape in shapes.items()}
    save_file(weights, folder / "HPSv3.safetensors")
    (folder / "config.json").write_text(json.dumps(BASE))
    (folder / "data_collator_qwen.py").write_text(QUESTION)


# --- the aesthetic head ---------------------------------------------------------------------------


def save_aesthetic(folder: Path) -> nn.Sequential:
    """Save a head as it is published: the layers' numbers count the dropout between; return it."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        layers = nn.Sequential(
            nn.Linear(768, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2),
            nn.Linear(128, 64), nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1),
        )  # fmt: skip
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    state = {f"layers.{name}": value for name, value in layers.state_dict().items()}
    torch.save(state, folder / "aesthetic-model.pth")
    return layers.eval()
