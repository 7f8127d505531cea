"""Wordings of the trees of a rollout: encoded in place of the prompts, never scored against."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.prompts.records import PromptRecord
from flowrl.prompts.refiner import Refiner, Wording
from flowrl.sampling.rollout import RolloutRequest
from flowrl.utils.distributed import Runtime

FLOOR, CLIP = 1e-4, 5.0  # added to the divisor of advantages, and their largest size (PromptRL)


@dataclass(slots=True, kw_only=True)
class Rewording:
    """Gives trees the wordings of a refiner, and tells it what they earned.

    The refiner works on the main process alone, so that all processes have the same wordings.
    """

    refiner: Refiner | None  # on the main process
    own_words: int  # trees of each prompt that keep its own words
    seed: int
    runtime: Runtime
    _wordings: list[list[Wording]] = field(init=False, default_factory=list)  # not yet learned from

    def reword(self, request: RolloutRequest, roots: int) -> RolloutRequest:
        """Return the request with another wording for all but the first trees of each prompt.

        Each of them is a prompt of its own there, also where words are equal: the number of texts
        that are encoded together decides the last bits, and must not depend on chance.
        """
        records, count = list(request.prompts), roots - self.own_words
        if not count:
            return request
        key = f"{self.seed}/refiner/{request.iteration}"
        texts = self._from_refiner(lambda refiner: self._propose(refiner, records, count, key))
        prompts = [
            replace(record, wording=text)
            for record, row in zip(records, texts, strict=True)
            for text in (None, *row)
        ]
        place = (torch.arange(roots) - self.own_words + 1).clamp(min=0)
        index = torch.arange(len(records))[:, None] * (count + 1) + place
        return replace(request, prompts=prompts, prompt=index.flatten())

    def best(self, records: Sequence[PromptRecord]) -> list[PromptRecord]:
        """Return the prompts with the wordings that are the most likely now."""
        texts = self._from_refiner(lambda refiner: [refiner.wording(r) for r in records])
        return [replace(record, wording=text) for record, text in zip(records, texts, strict=True)]

    def learn(self, reward: Tensor) -> dict[str, float]:
        """Let the refiner learn from the rewards of all processes' images; return its metrics.

        The z-score is over all trees of a prompt. Those of its own words have no form, and count as
        of the others' mean. The flow does not see the score of the form: it says nothing of images.

        Args:
            reward: (G,), tree by tree, NaN where there is none.
        """
        wordings, self._wordings = self._wordings, []
        if not wordings:  # all trees have their prompt's own words, or another process learns
            with self.runtime.raise_on_all():
                return {}
        forms = torch.tensor([[w.format for w in row] for row in wordings], dtype=torch.float64)
        mean_form = forms.mean(1, keepdim=True).expand(-1, self.own_words)
        trees = self.own_words + forms.shape[1]
        total = reward.cpu().double().view(len(wordings), trees, -1).nanmean(2)
        total = total + torch.cat([mean_form, forms], 1)
        distance = total - total.nanmean(1, keepdim=True)
        scale = distance.square().nanmean(1, keepdim=True).sqrt() + FLOOR
        advantage = (distance / scale).nan_to_num(0.0).clamp(-CLIP, CLIP)[:, self.own_words :]
        drawn = [wording for row in wordings for wording in row]
        with self.runtime.raise_on_all():
            assert self.refiner is not None
            metrics = self.refiner.learn(drawn, advantage.flatten().tolist())
        distinct = sum(len({w.text for w in row}) for row in wordings)
        same, reworded = total.split([self.own_words, forms.shape[1]], 1)
        return metrics | {
            "refiner/distinct": distinct / len(drawn),
            "refiner/format": forms.mean().item(),
            "refiner/gain": (reworded.nanmean() - same.nanmean()).item() if self.own_words else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        return {} if self.refiner is None else self.refiner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refiner is not None:
            self.refiner.load_state_dict(state)

    def _propose(
        self, refiner: Refiner, records: Sequence[PromptRecord], count: int, key: str
    ) -> list[list[str]]:
        self._wordings = refiner.propose(records, count, key)
        return [[wording.text for wording in row] for row in self._wordings]

    def _from_refiner(self, ask: Any) -> Any:
        """Return on all processes what `ask` returns of the refiner, as JSON has it."""

        def read() -> bytes:
            assert self.refiner is not None
            return json.dumps(ask(self.refiner)).encode()

        return json.loads(self.runtime.from_main(read))
