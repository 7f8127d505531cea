"""A causal language model that words prompts in other ways, trained with a LoRA of its own."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.prompts.refiner import KL_COEF, RefinerOptions, Wording

INSTRUCTION = (
    "Rewrite the following prompt of a text-to-image model so that the image shows all that it "
    "asks for, and nothing that contradicts it. Put the rewritten prompt, and nothing else, "
    "between <answer> and </answer>.\n\n{}"
)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MOST_TOKENS = 512  # of an answer, as in PromptRL
RANK = 16


class LanguageModelRefiner:
    """Draws wordings at temperature 1. An answer without its tags leaves the prompt as it is."""

    def __init__(self, options: RefinerOptions, path: str, seed: int, device: torch.device):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.device = device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError) as error:
            raise UserError(
                f"prompts.refiner.model {path!r} cannot be loaded as a causal language model "
                f"({str(error).splitlines()[0]}): name another, or set it to null for templates"
            ) from error
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model: Any = get_peft_model(model, lora).to(device).eval()
        self.weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.Adam(self.weights.values(), lr=options.lr or 1e-5)

    def propose(self, records: Sequence[PromptRecord], count: int, key: str) -> list[list[Wording]]:
        draws = []
        with torch.random.fork_rng():
            torch.manual_seed(int.from_bytes(key.encode(), "big") % (2**63 - 25))
            for record in records:
                before = self._question(record)
                answers = self._generate(before, do_sample=True, num_return_sequences=count)
                draws.append([self._wording(record, before, answer) for answer in answers])
        return draws

    def learn(self, wordings: Sequence[Wording], advantages: Sequence[float]) -> dict[str, float]:
        kl = 0.0
        for wording, advantage in zip(wordings, advantages, strict=True):
            with torch.no_grad(), self.model.disable_adapter():
                start = self.log_probs(wording)
            now = self.log_probs(wording)
            gap = start - now
            k3 = (gap.exp() - gap - 1).mean()
            # The ratio is 1, and its gradient that of the log-probability.
            gain = advantage * (now - now.detach()).exp().mean()
            ((KL_COEF * k3 - gain) / len(wordings)).backward()
            kl += k3.item() / len(wordings)
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        if not norm.isfinite():
            raise UserError("the refiner's gradient is not finite: lower prompts.refiner.lr")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"refiner/kl": kl}

    def log_probs(self, wording: Wording) -> Tensor:
        """Return the log-probability of each token of an answer, (T,) fp32."""
        tokens = torch.tensor([*wording.before, *wording.draw], device=self.device)
        logits = self.model(input_ids=tokens[None]).logits[0, len(wording.before) - 1 : -1]
        answer = tokens[len(wording.before) :, None]
        return logits.float().log_softmax(-1).gather(-1, answer).squeeze(-1)

    def wording(self, record: PromptRecord) -> str:
        before = self._question(record)
        return self._wording(record, before, self._generate(before, do_sample=False)[0]).text

    def state_dict(self) -> dict[str, Any]:
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return {"weights": weights, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self.weights.items():
            weight.data.copy_(state["weights"][name])
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = rate  # the recipe's, changed or not

    def _question(self, record: PromptRecord) -> list[int]:
        text = INSTRUCTION.format(record.text)
        if not self.tokenizer.chat_template:
            return self.tokenizer(text + "\n").input_ids
        chat = [{"role": "user", "content": text}]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @torch.no_grad()
    def _generate(self, before: Sequence[int], **how: Any) -> list[list[int]]:
        """Return the tokens of answers, each with the token that ends it, if it came."""
        from transformers import GenerationConfig

        ends = self.model.generation_config.eos_token_id
        ends = self.tokenizer.eos_token_id if ends is None else ends
        ends = ends if isinstance(ends, list) else [ends]
        # A model's own settings would draw from another policy than the one that learns.
        config = GenerationConfig(
            **how, max_new_tokens=MOST_TOKENS, eos_token_id=ends, pad_token_id=ends[0],
            temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
        )  # fmt: skip
        tokens = torch.tensor([before], device=self.device)
        rows = self.model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), generation_config=config
        )
        answers = []
        for row in rows[:, len(before) :].tolist():
            last = next((i for i, token in enumerate(row) if token in ends), len(row))
            answers.append(row[: last + 1])
        return answers

    def _wording(self, record: PromptRecord, before: list[int], answer: list[int]) -> Wording:
        texts = ANSWER.findall(self.tokenizer.decode(answer, skip_special_tokens=True))
        text = " ".join(texts[0].split()) if len(texts) == 1 else ""
        return Wording(
            text=text or record.text, format=float(bool(text)), draw=answer, before=before
        )
