"""A tiny Z-Image of diffusers' and transformers' own classes, with random weights."""

import string

import pytest
import torch

from flowrl.backbones.loading import load_pipeline, pipeline_path

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer():
    """A token a letter, and a chat as Qwen writes it."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *string.printable]
    letters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(known)}, known[0]))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": known[0], "unk_token": known[0], "eos_token": known[2]}
    made = PreTrainedTokenizerFast(
        tokenizer_object=letters, additional_special_tokens=known[1:3], **special
    )
    made.chat_template = CHAT
    return made


def text_encoder(words):
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
    )
    return Qwen3Model(config)


def transformer():
    from diffusers import ZImageTransformer2DModel

    made = ZImageTransformer2DModel(
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=6,
        n_kv_heads=6,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 16, 16],
    )
    for token in (made.x_pad_token, made.cap_pad_token):  # zeros in a fresh network
        torch.nn.init.normal_(token)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Z-Image with random weights, as diffusers saves it."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline

    own = AutoencoderKL.load_config(pipeline_path("tiny-sd3"), subfolder="vae")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        words = tokenizer()
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=AutoencoderKL.from_config(own).eval(),
            text_encoder=text_encoder(words).eval(),
            tokenizer=words,
            transformer=transformer().eval(),
        )
    pipeline.vae.register_to_config(scaling_factor=1.3, shift_factor=0.1)
    place = tmp_path_factory.mktemp("z-image")
    pipeline.save_pretrained(place)
    return str(place)


@pytest.fixture
def load(folder):
    return lambda dtype="fp32": load_pipeline(folder, dtype=dtype, device="cpu")
