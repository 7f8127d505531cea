"""Text is encoded once: a memory of every prompt's conditioning."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from flowrl.backbones.base import Backbone
from flowrl.backbones.offload import are_freed, encoders_of, visiting
from flowrl.backbones.prompt_cache import PromptCache
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.trajectory import Conditioning

CAPACITY = 2_048  # prompts; at the real sizes one takes megabytes
Key = tuple[str, str]  # prompt and negative prompt


class TextCache:
    """Conditioning by prompt; asks the text encoders only for prompts it does not remember.

    negative: the negative prompt of records that bring none. disk: where prompts are also kept
    between runs. Kept on the CPU; beyond `capacity` the prompts that were asked for longest ago
    are forgotten, None forgets none. Encoders that are elsewhere are on the backbone's device
    while they work. They compute in their own dtype, as in the pipeline's own call, whatever
    autocast is around.
    """

    def __init__(
        self,
        backbone: Backbone,
        negative: str = "",
        batch_size: int = 64,
        *,
        disk: PromptCache | None = None,
        capacity: int | None = CAPACITY,
    ):
        self.backbone = backbone
        self.negative = negative
        self.batch_size = batch_size
        self.disk, self.capacity = disk, capacity
        self.known: OrderedDict[Key, Conditioning] = OrderedDict()

    def __call__(self, prompts: Sequence[PromptRecord]) -> Conditioning:
        """Conditioning of len(prompts) rows on the backbone's device.

        Raises UserError for a prompt that is not known once the text encoders are gone.
        """
        keys = [self.key(prompt) for prompt in prompts]
        self._recall(keys)
        found = Conditioning.cat([self.known[key] for key in keys]).to(self.backbone.device)
        for key in keys:
            self.known.move_to_end(key)
        self._forget()
        return found

    def key(self, prompt: PromptRecord) -> Key:
        return prompt.read, self.negative if prompt.negative is None else prompt.negative

    def has(self, prompt: PromptRecord, *, whole: bool = False) -> bool:
        """Whether it can be had without the text encoders. whole: a file is read to the end."""
        key = self.key(prompt)
        if key in self.known or self.disk is None:
            return key in self.known
        return self.disk.load(*key) is not None if whole else self.disk.has(*key)

    def learn(self, prompts: Sequence[PromptRecord], rows: int | None = None) -> None:
        """Encode those that cannot be had yet, as many as can be kept; what is on disk stays
        there. Encoders that are elsewhere move once for all. rows: at once, None for batch_size."""
        rows = rows or self.batch_size
        missing = list({self.key(p): p for p in prompts if not self.has(p)}.values())
        missing = missing[: None if self.disk is not None else self.capacity]
        moved = encoders_of(self.backbone.pipeline) if missing else []
        with visiting(moved, self.backbone.device):
            for start in range(0, len(missing), rows):
                self.make(missing[start : start + rows])

    def make(self, prompts: Sequence[PromptRecord]) -> None:
        """Encode these, whatever is known of them."""
        self._encode([self.key(prompt) for prompt in prompts])
        self._forget()

    def nbytes(self) -> int:
        """What is remembered now, apart from the disk."""
        rows = (t for cond in self.known.values() for t in cond.tensors.values())
        return sum(t.numel() * t.element_size() for t in rows)

    def _recall(self, keys: Sequence[Key]) -> None:
        missing = []
        for key in dict.fromkeys(keys):
            if key in self.known:
                continue
            kept = None if self.disk is None else self.disk.load(*key)
            if kept is None:
                missing.append(key)
            else:
                self.known[key] = kept
        self._encode(missing)

    @torch.no_grad()
    def _encode(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        backbone, keys = self.backbone, list(dict.fromkeys(keys))
        if are_freed(backbone.pipeline):
            raise self._unknown(keys[0])
        plain = torch.autocast(backbone.device.type, enabled=False)
        with plain, visiting(encoders_of(backbone.pipeline), backbone.device):
            for start in range(0, len(keys), self.batch_size):
                part = keys[start : start + self.batch_size]
                cond = backbone.encode([p for p, _ in part], [n for _, n in part]).to("cpu")
                for i, key in enumerate(part):
                    self.known[key] = cond.take(torch.tensor([i]))
                    if self.disk is not None:
                        self.disk.save(*key, self.known[key])

    def _unknown(self, key: Key) -> UserError:
        """Why a prompt cannot be had without the text encoders."""
        path = None if self.disk is None else self.disk.path(*key)
        if path is not None and path.exists():
            return UserError(
                f"the encoded prompt {path} is damaged, and the text encoders that would make it "
                "anew are not there: remove the file and start again"
            )
        return UserError(
            f"the prompt {key[0]!r} is not among the prompts that were encoded before the text "
            "encoders were freed: set memory.text_encoders to offload or keep"
        )

    def _forget(self) -> None:
        while self.capacity is not None and len(self.known) > self.capacity:
            self.known.popitem(last=False)
