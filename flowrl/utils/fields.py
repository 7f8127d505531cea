"""What every option of the configuration is made of: a type, a meaning and a source."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

__all__ = [
    "Count",
    "Flag",
    "NonNegative",
    "Number",
    "Positive",
    "Options",
    "Text",
    "Whole",
    "option",
]


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


def option(default: Any, meaning: str, source: str = "") -> Any:
    """A field with what `flowrl explain` prints: its meaning and where its default comes from.

    `default` ... makes the option required.
    """
    return Field(default, description=meaning, json_schema_extra={"source": source})
