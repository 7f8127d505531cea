"""The language model refiner on a random tiny Llama: its loss, its answers, its state."""

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowrl.errors import UserError
from flowrl.prompts import language_model
from flowrl.prompts.language_model import LanguageModelRefiner
from flowrl.prompts.records import PromptRecord
from flowrl.prompts.refiner import RefinerOptions, Wording
from flowrl.utils.files import load_state, save_state

PROMPT = PromptRecord(uid="a", text="a red ring")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A random Llama of one layer, whose tokens are bytes."""
    path = tmp_path_factory.mktemp("llama")
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = Tokenizer(models.BPE(vocab=letters | {"</s>": 256}, merges=[]))
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="</s>")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=256, bos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture
def make(folder, monkeypatch):
    monkeypatch.setattr(language_model, "MOST_TOKENS", 6)

    def build(**options) -> LanguageModelRefiner:
        return LanguageModelRefiner(RefinerOptions(model=folder, **options), folder, 0, CPU)

    return build


def answer(refiner: LanguageModelRefiner, text: str) -> Wording:
    tokens = refiner.tokenizer(text).input_ids + [256]
    return refiner._wording(PROMPT, refiner._question(PROMPT), tokens)


def test_an_answer_in_its_tags_is_the_wording_and_any_other_leaves_the_prompt(make):
    refiner = make()
    good = answer(refiner, "so: <answer> one red\n ring </answer>")
    assert (good.text, good.format) == ("one red ring", 1.0)
    for text in ("a ring", "<answer></answer>", "<answer>a</answer> <answer>b</answer>"):
        bad = answer(refiner, text)
        assert (bad.text, bad.format) == (PROMPT.text, 0.0)


def test_the_gradient_is_that_of_the_token_means_and_zero_advantages_leave_the_start(
    make, monkeypatch
):
    monkeypatch.setattr(language_model, "KL_COEF", 0.0)
    refiner = make()
    wordings = [answer(refiner, "<answer>x</answer>"), answer(refiner, "no")]
    before = {name: weight.clone() for name, weight in refiner.weights.items()}
    assert refiner.learn(wordings, [0.0, 0.0]) == {"refiner/kl": 0.0}
    assert all(torch.equal(before[name], weight) for name, weight in refiner.weights.items())

    loss = -(1.5 * refiner.log_probs(wordings[0]).mean() - refiner.log_probs(wordings[1]).mean())
    expected = torch.autograd.grad(loss / 2, list(refiner.weights.values()))
    seen = {}
    refiner.optimizer.step = lambda: seen.update(  # type: ignore[method-assign]
        {name: weight.grad.clone() for name, weight in refiner.weights.items()}
    )
    refiner.learn(wordings, [1.5, -1.0])
    norm = math.sqrt(sum(g.square().sum().item() for g in expected))
    for gradient, ours in zip(expected, seen.values(), strict=True):
        torch.testing.assert_close(ours, gradient / max(norm, 1.0), atol=1e-5, rtol=1e-3)
    assert norm > 0


def test_an_answer_that_earns_more_grows_likelier_and_a_state_goes_on_bit_for_bit(make, tmp_path):
    refiner, other = make(lr=1e-2), make(lr=1e-2)
    wordings = [answer(refiner, "<answer>x</answer>"), answer(refiner, "no")]
    first = [refiner.log_probs(wording).mean().item() for wording in wordings]
    metrics = [refiner.learn(wordings, [1.0, -1.0]) for _ in range(3)]
    later = [refiner.log_probs(wording).mean().item() for wording in wordings]
    assert later[0] - later[1] > first[0] - first[1] + 0.1
    assert metrics[0]["refiner/kl"] == 0 < metrics[2]["refiner/kl"]
    save_state(tmp_path / "state", refiner.state_dict())
    other.load_state_dict(load_state(tmp_path / "state"))
    for one in (refiner, other):
        one.learn(wordings, [1.0, -1.0])
    assert all(map(torch.equal, refiner.weights.values(), other.weights.values()))


def test_draws_follow_the_key_at_the_models_own_chances(make):
    refiner = make()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    rows = refiner.propose([PROMPT, PROMPT], 50, "key")
    assert torch.equal(torch.get_rng_state(), state)  # training's own numbers stay as they were
    assert rows == refiner.propose([PROMPT, PROMPT], 50, "key") and rows[0] != rows[1]
    assert rows != refiner.propose([PROMPT, PROMPT], 50, "another")
    assert len({wording.draw[0] for wording in rows[0]}) > 30  # of 257, nearly uniform
    assert all(1 <= len(wording.draw) <= 6 for wording in rows[0])
    assert refiner.wording(PROMPT) == refiner.wording(PROMPT)


def test_a_folder_without_a_language_model_is_refused_by_its_option(tmp_path):
    options = RefinerOptions(model=str(tmp_path))
    with pytest.raises(UserError, match=r"prompts\.refiner\.model"):
        options.build(0, CPU)
