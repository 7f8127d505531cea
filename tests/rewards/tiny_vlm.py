"""A vision-language model of a few thousand random weights, served by `transformers serve`."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from chat_servers import free_port

SIDE, PATCH = 28, 14
SPECIAL = ["<s>", "</s>", "<pad>", "<image>"]
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endfor %}"
)
PATIENCE = 90  # seconds until it must have started


def tokenizer():
    """Byte-level: every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip


def write_vlm(folder: Path, says: str) -> None:
    """A LLaVA whose answers hold only the letters of `says`; which ones depends on the images.

    After a dozen letters the end of the answer becomes likelier with each.
    """
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    words = tokenizer()
    LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=words,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    size = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**size, image_size=SIDE, patch_size=PATCH),
        text_config=LlamaConfig(
            **size, vocab_size=len(words), max_position_embeddings=2048,
            bos_token_id=0, eos_token_id=1, pad_token_id=2,
        ),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config)
        for parameter in model.parameters():  # so that answers depend on the image
            if parameter.ndim > 1:
                parameter.data.mul_(8)
    allowed = set(words.convert_tokens_to_ids([*says, "</s>"]))
    model.generation_config.suppress_tokens = [i for i in range(len(words)) if i not in allowed]
    model.generation_config.min_new_tokens = 12
    model.generation_config.exponential_decay_length_penalty = (12, 10.0)
    model.save_pretrained(folder)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The base URL of a server of its own process, ended at the end."""
    port = free_port()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = "from transformers.cli.transformers import main; main()"
    arguments = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", command, *arguments, "--device", "cpu"],
            env=environment, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(OSError):
            direct.open(url, timeout=1).close()
            return
        time.sleep(0.1)
    raise AssertionError(f"no server after {PATIENCE} s: {log.read_text()[-2000:]}")
