"""HPSv3: which image people prefer for a prompt (Ma et al. 2025, arXiv 2508.03789).

A Qwen2-VL-7B that is asked to rate an image, and a head that reads mean and spread of its rating
from the token `<|Reward|>` in the question (7.7 G parameters, 15.5 GB in bf16; code MIT, Qwen2-VL
Apache-2.0). Qwen2-VL is transformers' own: the published file is read under its own names and needs
no other package. As in the published code all tokens, those of the image too, have consecutive
positions, which is not what Qwen2-VL does by itself.

The question is 25 lines that the model was trained with. They come with the authors' package, of
which nothing is run: `pip install --no-deps hpsv3`, or its file as `question`.
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .fixtures import red_and_blue
from .networks.loading import (
    DTYPES,
    building,
    check_dtype,
    device_of,
    fetching,
    fit,
    imported,
    mismatch,
    read_weights,
    text_tokenizer,
    under,
    weights_file,
)
from .networks.preprocess import NAME, resized
from .networks.sharing import shared

MODEL = "MizzenAI/HPSv3"
FILE = "HPSv3.safetensors"
BASE = "Qwen/Qwen2-VL-7B-Instruct"  # of which only its sizes and its tokenizer are read
TOKEN = "<|Reward|>"  # the head reads it; the last one of the vocabulary
SOURCE = Path("dataset", "data_collator_qwen.py")  # in the package, with the question
PARTS = ("INSTRUCTION", "prompt_with_special_token")  # the texts in it, and what the first holds
HOLE = "{text_prompt}"
BEFORE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
)
IMAGE, AFTER = "<|image_pad|>", "<|im_end|>\n<|im_start|>assistant\n"
SIZES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
PIXELS = 256 * 28 * 28  # every image is brought to about so many, in its proportions
PREFIXES = {"visual.": "visual.", "model.": "language_model."}  # published -> transformers
HEAD = "rm_head."


class HPSv3:
    """The mean of the predicted preference, about 0 to 15; its spread is not used.

    model: a name on the Hugging Face hub, a folder with the file HPSv3.safetensors, or such a file.
    base: the Qwen2-VL that it was made from, for sizes and tokenizer, a name there or a folder.
    question: the file data_collator_qwen.py of the authors' package; without it, of the one that is
    installed.
    """

    name = "hpsv3"
    bounds = (None, None)
    differentiable = True
    fixtures = staticmethod(red_and_blue)

    def __init__(
        self,
        *,
        model: str = MODEL,
        base: str = BASE,
        question: str | None = None,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "bf16",
    ):
        self.model, self.base, self.question, self.revision = model, base, question, revision
        self.device, self.dtype = device, check_dtype(dtype)
        self._shared = shared(("hpsv3", model, revision, device, dtype), self)
        named = f"{model}@{revision}" if revision else model
        self.version = f"hpsv3-2/{named}/{dtype}/{NAME}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        question = self._question  # first: a missing text is cheaper to see than 16 GB to load
        texts = [question.replace(HOLE, prompt) for prompt in prompts]
        return self._shared.recall(tuple(texts), images, lambda: self._means(images, texts))

    def _means(self, images: Tensor, texts: list[str]) -> Tensor:
        network, head = self._loaded
        vision = network.config.vision_config
        side, merged = vision.patch_size, vision.spatial_merge_size
        resize = imported(f"{SIZES}:smart_resize", "HPSv3")
        height, width = resize(*images.shape[-2:], side * merged, PIXELS, PIXELS)
        pixels = resized(images.to(network.device), height, width)
        rows, columns = height // side, width // side
        grid = torch.tensor([[1, rows, columns]] * len(images), device=network.device)
        patches = to_patches(pixels, side, merged, vision.temporal_patch_size).to(network.dtype)
        seen = network.visual(patches, grid_thw=grid)
        tokens = self._tokens(texts, rows * columns // merged**2).to(network.device)
        hidden = read(network, tokens, getattr(seen, "pooler_output", seen))
        where = tokens["input_ids"] == self._tokenizer.convert_tokens_to_ids(TOKEN)
        return head(hidden[where].float())[:, 0]

    def _tokens(self, texts: list[str], image_tokens: int) -> Any:
        """Tokenise, padded on the right. Raises ValueError for a prompt with the model's own
        tokens.
        """
        for text in texts:
            if text.count(TOKEN) != 1 or IMAGE in text:
                raise ValueError(f"HPSv3 cannot rate for a prompt that holds {TOKEN} or {IMAGE}")
        inputs = [f"{BEFORE}{IMAGE * image_tokens}<|vision_end|>{text}{AFTER}" for text in texts]
        return self._tokenizer(inputs, padding=True, padding_side="right", return_tensors="pt")

    @functools.cached_property
    def _tokenizer(self) -> Any:
        tokenizer = text_tokenizer(self.base, "HPSv3")
        tokenizer.add_tokens([TOKEN], special_tokens=True)
        return tokenizer

    @functools.cached_property
    def _question(self) -> str:
        return read_question(self.question)

    @functools.cached_property
    def _loaded(self) -> tuple[Any, nn.Module]:
        return self._shared.load(self._load)

    def _load(self) -> tuple[Any, nn.Module]:
        """Return a Qwen2VLModel of transformers, and the head in float32."""
        path = weights_file(self.model, FILE, self.revision)
        kind = imported("transformers:AutoConfig", "HPSv3")
        with fetching(self.base, '--include "*.json" "*.txt"'):
            config = kind.from_pretrained(self.base)
        network, head = build(read_weights(path), path, config, DTYPES[self.dtype])
        words = network.get_input_embeddings().num_embeddings
        number = self._tokenizer.convert_tokens_to_ids(TOKEN)
        if number >= words:
            raise ValueError(
                f"{path} knows {words} tokens, and {TOKEN} is number {number} of the tokenizer of "
                f"{self.base}: give the `base` that these weights were made from"
            )
        device = device_of(self.device)
        for part in (network, head):
            part.eval().requires_grad_(False).to(device)
        return network, head


def read(network: Any, tokens: Any, seen: Tensor) -> Tensor:
    """Return hidden states (B, L, D) of the tokens, those of the image in their places.

    The language model is called by itself, without positions: so it counts 0, 1, 2, ..., as in the
    published code.
    """
    ids = tokens["input_ids"]
    vectors = network.get_input_embeddings()(ids)
    places = (ids == network.config.image_token_id)[..., None].expand_as(vectors)
    vectors = vectors.masked_scatter(places, seen.to(vectors.dtype))
    return network.language_model(
        inputs_embeds=vectors, attention_mask=tokens["attention_mask"], use_cache=False
    ).last_hidden_state


def build(
    state: Mapping[str, Tensor], path: Path, config: Any, dtype: torch.dtype
) -> tuple[Any, nn.Module]:
    """Return the two networks of a file in HPSv3's published layout, on the CPU.

    config: of the Qwen2-VL; how many tokens there are is the file's to say. Raises ValueError of
    one sentence for another layout.
    """
    parts = to_transformers(state)
    kind = imported("transformers:Qwen2VLModel", "HPSv3")
    words = parts.get("language_model.embed_tokens.weight")
    if words is None or f"{HEAD}0.weight" not in state:
        raise ValueError(
            f"{path} does not hold the weights of HPSv3: expected names such as "
            f"model.embed_tokens.weight and {HEAD}0.weight, got {next(iter(state), 'none')}"
        )
    config.get_text_config().vocab_size = words.shape[0]
    with building():
        with torch.device("meta"):
            expected = kind(config).state_dict()
        if wrong := mismatch(expected, parts):
            raise ValueError(f"{path} does not hold the weights of HPSv3: {wrong}")
        network = kind.from_pretrained(None, config=config, state_dict=parts, dtype=dtype)
        head = nn.Sequential(
            nn.Linear(words.shape[1], 1024), nn.ReLU(), nn.Identity(),  # dropout in training
            nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2),
        )  # fmt: skip
    fit(head, under(state, HEAD), path, "HPSv3's head")
    return network, head


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of Qwen2-VL under transformers' names, without the language head."""
    return {
        ours + name[len(theirs) :]: value
        for name, value in state.items()
        for theirs, ours in PREFIXES.items()
        if name.startswith(theirs)
    }


def read_question(file: str | None) -> str:
    """Return the question with `{text_prompt}` in it, from the source of the authors' package.

    The file is parsed, never run. Raises FileNotFoundError or ValueError of one sentence.
    """
    path = Path(file) if file else _installed()
    if path is None or not path.is_file():
        raise FileNotFoundError(
            "HPSv3 needs the question that it was trained with: `pip install --no-deps hpsv3` "
            f"brings it (nothing of that package is run), or give its file {SOURCE.name} as "
            f"`question` (got {file!r})"
        )
    texts: dict[str, str] = {}
    for line in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            text = str(line.value.value)
            texts |= {target.id: text for target in line.targets if isinstance(target, ast.Name)}
    parts = [texts.get(name, "") for name in PARTS]
    if HOLE not in parts[0] or parts[1].count(TOKEN) != 1:
        raise ValueError(
            f"{path} does not hold HPSv3's question: expected {PARTS[0]} with {HOLE} and "
            f"{PARTS[1]} with {TOKEN}"
        )
    return "".join(parts)


def _installed() -> Path | None:
    """Return where the package `hpsv3` keeps its question; it is found without being imported."""
    spec = importlib.util.find_spec("hpsv3")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) / SOURCE if places else None


def to_patches(images: Tensor, side: int, merged: int, times: int) -> Tensor:
    """Return what Qwen2-VL's vision network reads of normalised images: (B · patches, 3 · times ·
    side²).

    Patches of `side` pixels follow each other in squares of merged x merged; an image counts as
    `times` equal frames.
    """
    batch, channels, height, width = images.shape
    cells = images.view(
        batch, channels,
        height // side // merged, merged, side,
        width // side // merged, merged, side,
    ).permute(0, 2, 5, 3, 6, 1, 4, 7)  # fmt: skip
    cells = cells.reshape(-1, channels, 1, side, side).expand(-1, -1, times, -1, -1)
    return cells.reshape(len(cells), -1)
