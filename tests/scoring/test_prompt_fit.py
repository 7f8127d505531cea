import pytest

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, load_prompts
from flowrl.scoring.spec import RewardSpec, check_evaluation, check_prompts, load_reward


def constant(images, prompts, metadata):
    return [0.25] * len(images)


def test_prompts_that_rewards_cannot_score_are_found_before_training():
    geneval = RewardSpec(name="geneval", reward=load_reward("geneval"))
    ocr = RewardSpec(name="ocr", reward=load_reward("ocr"))
    mixed = load_prompts("tiny:all:test", limit=14)
    check_prompts([geneval, ocr], mixed)
    with pytest.raises(UserError, match="no reward applies to the prompt"):
        check_prompts([geneval], mixed)
    with pytest.raises(UserError, match="'ocr' applies to none"):
        check_prompts([geneval, ocr], [p for p in mixed if p.metadata["tag"] != "ocr"])
    plain = [PromptRecord(uid="0", text="a cat")]
    check_prompts([RewardSpec(name="any", reward=constant)], plain)
    # A prompt that the detector cannot judge is found before training.
    geneval = RewardSpec(name="geneval", reward=load_reward("geneval"))
    bench = {"tag": "single_object", "include": [{"class": "bench", "count": 1}]}
    photo = [PromptRecord(uid="0", text="a photo of a bench", metadata=bench)]
    for check in (check_prompts, check_evaluation):
        with pytest.raises(UserError, match="'tiny' does not know 'bench'"):
            check([geneval], photo)
    # Held out prompts that nothing can score are found before training.
    geneval = RewardSpec(name="geneval", reward=load_reward("geneval"))
    plain = [PromptRecord(uid="0", text="a cat")]
    with pytest.raises(UserError, match="any of the 1 evaluation.prompts"):
        check_evaluation([geneval], plain)
    check_evaluation([geneval], plain + load_prompts("tiny:colors:test", limit=1))
    check_evaluation([geneval], [])
