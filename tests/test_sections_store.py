import pytest
from pydantic import ValidationError

from flowrl.config.rollout import StoreOptions


def test_a_store_is_nothing_but_a_folder_unless_asked():
    store = StoreOptions(path="stores/a")
    assert store.refresh_every is None and store.cache_draws is None


@pytest.mark.parametrize("name", ["refresh_every", "cache_draws"])
def test_options_of_a_store_that_is_not_named_are_refused(name):
    with pytest.raises(ValidationError, match=f"store.{name} is set without rollout.store.path"):
        StoreOptions.model_validate({name: 4})
    assert getattr(StoreOptions.model_validate({"path": "a", name: 4}), name) == 4
