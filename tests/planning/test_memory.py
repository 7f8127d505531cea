from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_sizes import TARGETS, setup, small

from flowrl.errors import UserError
from flowrl.planning.activations import adapter_parameters, encode_peak, keep_wide
from flowrl.planning.memory import CONTEXT, PHASES, Copy, _Planner, footprints, network_of, peak
from flowrl.planning.model_specs import SIZES, T5_XXL, TextEncoder
from flowrl.trees import presets
from flowrl.trees.memory import rollout_bytes
from flowrl.trees.plan import ode_plan

NAME = "flux.1-dev"
SIZE = small(NAME)


def parts(phase, **changes):
    found = {f.phase: f for f in footprints(SIZE, setup(NAME, **changes))}
    return found[phase].parts


def total(**changes):
    return peak(footprints(SIZE, setup(NAME, **changes))).total


def test_the_phases_come_in_their_order():
    assert tuple(f.phase for f in footprints(SIZE, setup(NAME, evaluation_batch=2))) == PHASES
    assert tuple(f.phase for f in footprints(SIZE, setup(NAME))) == PHASES[:-1]


def test_a_total_is_the_sum_of_its_parts_and_torch_does_not_see_the_context():
    for footprint in footprints(SIZE, setup(NAME)):
        assert footprint.total == sum(footprint.parts.values())
        assert footprint.total - footprint.allocated >= CONTEXT


def test_adamw_takes_8_bytes_a_trained_number_and_adapters_4_each():
    numbers = adapter_parameters(network_of(SIZE, setup(NAME)), 4, TARGETS["flux"])
    assert parts("rollout")["optimiser"] == 8 * numbers
    assert parts("rollout", adapters=3)["adapters"] == 12 * numbers
    assert parts("training", adapters=3)["adapters"] == 16 * numbers  # with the gradient


def test_latents_are_those_that_the_rollout_itself_foretells():
    s = setup(NAME)
    expected = rollout_bytes(s.plan, s.prompts_per_gpu, 16 * 8 * 8, 2)
    assert parts("rollout")["latents"] == parts("training")["latents"] == expected


def test_candidates_are_held_a_batch_of_trees_at_a_time_and_gone_before_training():
    """50 trees of 9 nodes, of which 4 are there at once, and then 4 of 3 nodes that are kept."""
    few = {"plan": presets.ode(2, 4), "prompts_per_gpu": 1}
    many = few | {"candidates": presets.ode(8, 50)}
    batch = rollout_bytes(presets.ode(8, 4), 1, 16 * 8 * 8, 2)
    assert batch > parts("rollout", **few)["latents"]
    for phase in ("rollout", "decode"):
        assert parts(phase, **many)["latents"] == batch
    for phase in ("rewards", "training"):
        assert parts(phase, **many)["latents"] == parts(phase, **few)["latents"]


def test_no_more_pictures_are_decoded_at_once_than_a_batch_of_trees_has():
    one, four, many = (
        parts("decode", rollout_batch=rows, decode_batch=size)["activations"]
        for rows, size in ((1, 4), (4, 4), (4, 64))
    )
    assert one < four == many


def test_an_evaluation_holds_the_latents_of_its_steps_and_decodes_no_more_than_its_batch():
    few = parts("evaluation", evaluation_batch=2, evaluation_steps=4, decode_batch=2)
    assert few["latents"] == rollout_bytes(ode_plan(4), 2, 16 * 8 * 8, 2)
    more = parts("evaluation", evaluation_batch=2, evaluation_steps=9, decode_batch=64)
    assert more["latents"] > few["latents"] and more["activations"] == few["activations"]


def test_guidance_doubles_the_rows_of_a_rollout():
    twice = parts("rollout", rollout_batch=4, rollout_doubles=True)["activations"]
    assert twice == parts("rollout", rollout_batch=8, prompts_per_gpu=4)["activations"]
    assert parts("rollout", rollout_doubles=True)["text"] == 2 * parts("rollout")["text"]


def test_guidance_doubles_the_rows_of_training():
    twice = parts("training", micro_batch=1, training_doubles=True)["activations"]
    assert twice == parts("training", micro_batch=2)["activations"]


def test_text_encoders_are_there_while_they_work_and_where_they_are_kept():
    size = replace(SIZE, text_encoders=(ENCODER,))
    for how, elsewhere in (("keep", 2000), ("offload", 0), ("free", 0)):
        found = footprints(size, setup(NAME, text_encoders=how))
        held = {f.phase: f.parts["text encoders"] for f in found}
        assert held.pop("encode") == 2000
        assert set(held.values()) == {elsewhere}


def test_as_many_texts_are_encoded_at_once_as_there_are_and_all_before_encoders_go(monkeypatch):
    monkeypatch.setattr("flowrl.planning.memory.encode_peak", lambda size, rows, *_: rows)

    def rows(**changes):
        return _Planner(SIZE, setup(NAME, **changes))._encode()["activations"]

    assert rows() == 2
    assert rows(evaluation_batch=5) == 5
    assert rows(evaluation_batch=99) == rows(text_encoders="free") == 64


def test_in_fp16_a_t5_keeps_what_transformers_keeps_in_fp32():
    size = replace(SIZE, text_encoders=(replace(ENCODER, wide=300),))
    held = {
        dtype: footprints(size, setup(NAME, dtype=dtype))[0].parts["text encoders"]
        for dtype in ("bf16", "fp16", "fp32")
    }
    assert held == {"bf16": 2000, "fp16": 2600, "fp32": 4000}
    size = replace(SIZE, text_encoders=(replace(ENCODER, config=ENCODER.config | {"d_ff": 4096}),))  # type: ignore[operator]
    assert encode_peak(size, 1, None, torch.float16) > encode_peak(size, 1, None, torch.bfloat16)


def test_what_t5_xxl_keeps_in_fp32_is_its_own_classes():
    from transformers import T5Config, T5EncoderModel

    with torch.device("meta"):
        network = T5EncoderModel(T5Config(**T5_XXL.config))
    assert keep_wide(network.half()) == T5_XXL.wide
    held = sum(p.numel() * p.element_size() for p in network.parameters())
    assert T5_XXL.nbytes(torch.float16) == held
    assert T5_XXL.nbytes(torch.bfloat16) == 2 * T5_XXL.parameters


def test_an_offloaded_autoencoder_is_there_while_it_decodes():
    held = {f.phase: f.parts["autoencoder"] for f in footprints(SIZE, setup(NAME, vae="offload"))}
    assert held.pop("decode") == 2 * SIZE.autoencoder_params
    assert set(held.values()) == {0}


def test_folded_weights_lie_twice_while_pictures_are_made():
    assert parts("rollout", merged=True)["folded"] > 0
    assert parts("decode", merged=True)["folded"] > 0
    assert "folded" not in parts("training", merged=True)


def test_copies_and_rewards_are_there_all_the_time():
    for footprint in footprints(SIZE, setup(NAME, copies=(Copy(format="bf16"),), reward_bytes=7)):
        assert footprint.parts["copies"] > 0
        assert footprint.parts["rewards"] == 7


def test_training_in_few_bits_keeps_the_exact_weights_too():
    packed = Copy(format="fp8", min_dim=0)
    few, exact = parts("training", training_copy=packed), parts("training")
    assert few["transformer"] == exact["transformer"]
    assert few["copies"] > 0
    assert few["workspace"] > exact["workspace"]


@pytest.mark.parametrize("name", ["sd3.5-medium", "sana-1.6b"])
def test_the_other_families_have_a_plan_too(name):
    assert peak(footprints(small(name), setup(name))).total > 0


@settings(deadline=None, max_examples=6)
@given(st.integers(1, 4), st.integers(1, 4))
def test_more_gpus_never_need_more(prompts, more):
    """Which is that fewer prompts a GPU never do."""
    assert total(prompts_per_gpu=prompts) <= total(prompts_per_gpu=prompts + more)


@pytest.mark.slow
@settings(deadline=None, max_examples=4)
@given(st.integers(1, 2), st.booleans())
def test_larger_micro_batches_never_need_less(rows, checkpointing):
    few, more = (
        total(micro_batch=n, gradient_checkpointing=checkpointing) for n in (rows, rows + 1)
    )
    assert few <= more


def test_sides_that_cannot_be_patched_are_an_error():
    with pytest.raises(UserError, match="multiple of"):
        footprints(SIZE, setup(NAME, width=60))


def test_numbers_below_one_are_an_error():
    with pytest.raises(UserError, match="micro_batch is 0"):
        setup(NAME, micro_batch=0)


def test_encoding_more_texts_takes_more():
    size = replace(SIZES["sd3.5-medium"], text_encoders=(ENCODER,))
    assert encode_peak(size, 4, None, torch.bfloat16) > encode_peak(size, 1, None, torch.bfloat16)
    assert encode_peak(SIZE, 4, None, torch.bfloat16) == 0


ENCODER = TextEncoder(
    name="a T5",
    model="T5EncoderModel",
    config_class="T5Config",
    config={
        "vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 4,
        "feed_forward_proj": "gated-gelu",
    },
    parameters=1000,
)  # fmt: skip
