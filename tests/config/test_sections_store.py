import pytest
from pydantic import ValidationError

from flowrl.config.rollout import StoreOptions


def test_a_store_is_a_folder_and_its_options_need_one():
    store = StoreOptions(path="stores/a")
    assert store.refresh_every is None and store.cache_draws is None
    for name in ["refresh_every", "cache_draws"]:
        with pytest.raises(
            ValidationError, match=f"store.{name} is set without rollout.store.path"
        ):
            StoreOptions.model_validate({name: 4})
        assert getattr(StoreOptions.model_validate({"path": "a", name: 4}), name) == 4
