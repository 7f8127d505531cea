import pytest

from flowrl.objectives.nft import old_decay, renewed


def test_schedules():
    for decay, values in [
        (old_decay(rate=None, limit=0.0), {0: 0.0, 10_000: 0.0}),  # DiffusionNFT's code, type 0
        (old_decay(rate=0.001, limit=0.5), {0: 0.0, 1: 0.001, 500: 0.5, 501: 0.5}),  # 1
        (
            old_decay(rate=0.0075, limit=0.999, start=75),  # 2
            {0: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 209: 0.999, 1000: 0.999},
        ),
        (old_decay(rate=0.001, limit=0.3), {100: 0.1, 300: 0.3, 301: 0.3}),  # AWM's average
        (old_decay(rate=None, limit=0.9, start=5), {4: 0.0, 5: 0.9, 100: 0.9}),
    ]:
        assert {i: decay(i) for i in values} == pytest.approx(values, abs=1e-12)


def test_a_decay_is_a_share():
    for make, message in [
        (lambda: old_decay(rate=None, limit=1.1), "limit"),
        (lambda: old_decay(rate=0.1, limit=-0.1), "limit"),
        (lambda: old_decay(rate=-0.1, limit=0.5), "rate"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_a_renewed_copy_is_taken_anew_now_and_then_and_kept_in_between():
    assert [renewed(3)(i) for i in range(7)] == [0, 1, 1, 0, 1, 1, 0]
    assert [renewed(1)(i) for i in range(3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="every"):
        renewed(0)
