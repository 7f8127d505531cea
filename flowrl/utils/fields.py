"""What every option of the configuration is made of: a type, a meaning and a source."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool


def _refuse_bool(value: Any) -> Any:
    # Python counts True as 1, and so would pydantic: `rank: true` must not mean rank 1.
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


def _refuse_float(value: Any) -> Any:
    # A count written 1e4 or 8.0 is more likely a value meant for another option.
    if isinstance(value, float):
        raise ValueError(f"expected a whole number without point or exponent, got {value}")
    return _refuse_bool(value)


def _refuse_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("expected some text, got none")
    return value


Number = Annotated[float, BeforeValidator(_refuse_bool)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_refuse_bool)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(_refuse_bool)]
Whole = Annotated[int, Field(ge=0), BeforeValidator(_refuse_float)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_refuse_float)]
Flag = StrictBool
Text = Annotated[str, AfterValidator(_refuse_empty)]


class Options(BaseModel):
    """A group of options: unknown keys, infinities and later changes are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    def arguments(self) -> dict[str, Any]:
        """Return the fields as keyword arguments, nested options built, without `kind`."""
        return {
            name: _built(getattr(self, name)) for name in type(self).model_fields if name != "kind"
        }

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Return the object these options describe: here the options themselves, as plain data."""
        return self


def _built(value: Any) -> Any:
    if isinstance(value, Options):
        return value.build()
    if isinstance(value, tuple | list):
        return type(value)(_built(item) for item in value)
    if isinstance(value, dict):
        return {key: _built(item) for key, item in value.items()}
    return value


def option(default: Any, meaning: str, source: str = "") -> Any:
    """Return a field with what `flowrl explain` prints. A default of ... makes it required."""
    return Field(default, description=meaning, json_schema_extra={"source": source})
