from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_sizes import TARGETS, setup, small

from flowrl.errors import UserError
from flowrl.planning.activations import encode_peak
from flowrl.planning.memory import (
    CONTEXT,
    NetworkCopy,
    _Planner,
    adapter_parameters,
    footprints,
    full_network,
    host_bytes,
    peak,
)
from flowrl.planning.model_specs import MODEL_SPECS, TextEncoder, keep_fp32
from flowrl.trees import presets
from flowrl.trees.memory import rollout_bytes
from flowrl.trees.plan import ode_plan

PHASES = ("encode", "rollout", "decode", "rewards", "training", "evaluation")
NAME = "flux.1-dev"
SIZE = small(NAME)


def parts(phase, **changes):
    found = {f.phase: f for f in footprints(SIZE, setup(NAME, **changes))}
    return found[phase].parts


def total(**changes):
    return peak(footprints(SIZE, setup(NAME, **changes))).total


@pytest.mark.slow
def test_phases_come_in_their_order_and_a_total_is_the_sum_of_its_parts_with_the_context():
    found = footprints(SIZE, setup(NAME, evaluation_batch=2))
    assert tuple(f.phase for f in found) == PHASES
    assert tuple(f.phase for f in footprints(SIZE, setup(NAME))) == PHASES[:-1]
    for footprint in found:
        assert footprint.total == sum(footprint.parts.values())
        assert footprint.total - footprint.allocated >= CONTEXT


def test_adamw_takes_8_bytes_a_trained_number_and_adapters_4_each():
    numbers = adapter_parameters(full_network(SIZE, torch.bfloat16), 4, TARGETS["flux"])
    assert parts("rollout")["optimiser"] == 8 * numbers
    assert parts("rollout", adapters=3)["LoRA adapters"] == 12 * numbers
    assert parts("training", adapters=3)["LoRA adapters"] == 16 * numbers  # with the gradient


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


@pytest.mark.slow
def test_no_more_images_are_decoded_at_once_than_a_batch_of_trees_has():
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


@pytest.mark.slow
def test_guidance_doubles_the_rows_of_a_rollout_and_of_training():
    twice = parts("rollout", rollout_batch=4, rollout_doubles=True)
    more = parts("rollout", rollout_batch=8, prompts_per_gpu=4)
    assert twice["activations"] == more["activations"]
    assert twice["text embeddings"] == 2 * parts("rollout")["text embeddings"]
    twice = parts("training", micro_batch=1, training_doubles=True)["activations"]
    assert twice == parts("training", micro_batch=2)["activations"]


@pytest.mark.slow
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
        return _Planner(SIZE, setup(NAME, **changes)).encode()["activations"]

    assert rows() == 2
    assert rows(evaluation_batch=5) == 5
    assert rows(evaluation_batch=99) == 64
    first = {"text_encoders": "free", "evaluation_batch": 99}
    assert [rows(**first, encoded_tokens=n) for n in (12, 512, 9999)] == [64, 8, 1]


def test_encoders_that_are_not_kept_are_alone_on_the_device_one_at_a_time():
    both = replace(SIZE, text_encoders=(ENCODER, replace(ENCODER, parameters=300)))
    for where in ("offload", "free"):
        planner = _Planner(both, setup(NAME, text_encoders=where, reward_bytes=5))
        (first,) = [p.parts for p in planner.footprints() if p.phase == "encode"]
        assert first["text encoders"] == 2 * max(ENCODER.parameters, 300)
        assert first["reward models"] == 5 and not first.get("transformer")
    kept = next(p.parts for p in _Planner(both, setup(NAME)).footprints() if p.phase == "encode")
    assert kept["text encoders"] == 2 * (ENCODER.parameters + 300) and kept["transformer"]


def test_in_fp16_a_t5_keeps_what_transformers_keeps_in_fp32():
    size = replace(SIZE, text_encoders=(replace(ENCODER, fp32_parameters=300),))
    held = {
        dtype: _Planner(size, setup(NAME, dtype=dtype)).encode()["text encoders"]
        for dtype in ("bf16", "fp16", "fp32")
    }
    assert held == {"bf16": 2000, "fp16": 2600, "fp32": 4000}
    size = replace(SIZE, text_encoders=(replace(ENCODER, config=ENCODER.config | {"d_ff": 4096}),))  # type: ignore[operator]
    assert encode_peak(size, 1, None, torch.float16) > encode_peak(size, 1, None, torch.bfloat16)
    assert encode_peak(size, 4, None, torch.bfloat16) > encode_peak(size, 1, None, torch.bfloat16)
    assert encode_peak(SIZE, 4, None, torch.bfloat16) == 0


def test_what_t5_xxl_keeps_in_fp32_is_its_own_classes():
    t5 = MODEL_SPECS["flux.1-dev"].text_encoders[1]
    network = t5.build(torch.float32)
    assert keep_fp32(network.half()) == t5.fp32_parameters
    held = sum(p.numel() * p.element_size() for p in network.parameters())
    assert t5.nbytes(torch.float16) == held
    assert t5.nbytes(torch.bfloat16) == 2 * t5.parameters


def test_what_is_offloaded_folded_or_copied_is_there_when_it_is_used():
    changes = {"vae": "offload", "merged": True, "copies": (NetworkCopy(format="bf16"),)}
    found = {f.phase: f.parts for f in footprints(SIZE, setup(NAME, reward_bytes=7, **changes))}
    held = {phase: of["autoencoder"] for phase, of in found.items()}
    assert held.pop("decode") == 2 * SIZE.autoencoder_params
    assert set(held.values()) == {0}
    assert found["rollout"]["merged weights"] > 0 and found["decode"]["merged weights"] > 0
    assert "merged weights" not in found["training"]
    assert all(of["network copies"] > 0 and of["reward models"] == 7 for of in found.values())


def test_training_in_few_bits_keeps_the_exact_weights_too():
    packed = NetworkCopy(format="fp8", min_dim=0)
    few, exact = parts("training", training_copy=packed), parts("training")
    assert few["transformer"] == exact["transformer"]
    assert few["network copies"] > 0
    assert few["matmul buffers"] > exact["matmul buffers"]


def test_more_gpus_never_need_more():
    found = [total(prompts_per_gpu=prompts) for prompts in (1, 2, 3, 5, 8)]
    assert found == sorted(found)


@pytest.mark.slow
@settings(deadline=None, max_examples=4)
@given(st.integers(1, 2), st.booleans())
def test_larger_micro_batches_never_need_less(rows, checkpointing):
    few, more = (
        total(micro_batch=n, gradient_checkpointing=checkpointing) for n in (rows, rows + 1)
    )
    assert few <= more


def test_sides_that_cannot_be_patched_and_numbers_below_one_are_an_error():
    with pytest.raises(UserError, match="60 .* 16"):
        footprints(SIZE, setup(NAME, width=60))
    with pytest.raises(UserError, match="micro_batch is 0"):
        setup(NAME, micro_batch=0)


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


def test_of_a_network_in_parts_a_gpu_holds_its_share_and_what_computes_now():
    whole = parts("rollout")["transformer"]
    shares = [parts("rollout", parts=n)["transformer"] for n in (2, 4, 8)]
    gathered = shares[0] - whole / 2  # the largest block and what is in no block
    assert 0 < gathered < whole / 2
    for share, gpus in zip(shares, (2, 4, 8), strict=True):
        assert share == pytest.approx(whole / gpus + gathered, abs=2)


def test_a_machine_s_memory_holds_every_process_s_pipeline_but_one_network_in_parts():
    of = {
        (gpus, n): host_bytes(SIZE, setup(NAME, parts=n), gpus)["loading"]
        for gpus in (1, 8)
        for n in (1, 8)
    }
    others = of[8, 8] - of[1, 1]  # of seven more processes: all but the transformer
    assert of[8, 1] == 8 * of[1, 1]
    assert 0 < others == 7 * (of[1, 1] - parts("rollout")["transformer"])
    # Freed encoders are gone when the transformer is read.
    free = host_bytes(SIZE, setup(NAME, text_encoders="free", prompts=3, host_reward_bytes=7), 2)
    assert of[1, 1] * 2 - free["loading"] == 2 * _Planner(SIZE, setup(NAME)).encoders
    assert free["encoded prompts"] == 2 * _Planner(SIZE, setup(NAME)).text(3, False)
    assert free["reward models"] == 14
