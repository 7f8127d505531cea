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


def _refuse_huge(value: int) -> int:
    if value > LARGEST:
        raise ValueError(f"expected at most {LARGEST:,}")
    return value


def _check_name(value: str) -> str:
    if not value.strip():
        raise ValueError("expected some text, got none")
    return value


def check_unicode(value: str) -> str:
    """Return a text that files and tokenizers take. Raises ValueError for half a character."""
    surrogate = next((c for c in value if "\ud800" <= c <= "\udfff"), None)
    if surrogate is not None:
        raise ValueError(
            f"the text holds {surrogate!a}, half of a surrogate pair, which is no character: "
            "write the character itself"
        )
    return value


LARGEST = 2**63  # 64 bits hold every number below
Number = Annotated[float, BeforeValidator(_refuse_bool)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_refuse_bool)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(_refuse_bool)]
Whole = Annotated[int, Field(ge=0), BeforeValidator(_refuse_float), AfterValidator(_refuse_huge)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_refuse_float), AfterValidator(_refuse_huge)]
Several = Annotated[Count, Field(le=1_000_000)]  # of what is listed one by one
Choice = BeforeValidator(_refuse_float)  # of numbers: Python takes true and 1.0 for 1
Flag = StrictBool
Text = Annotated[str, AfterValidator(_check_name)]


class Options(BaseModel):
    """A group of options: unknown keys, infinities and later changes are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def option(default: Any, meaning: str, source: str = "") -> Any:
    """Return a field with what `flowrl explain` prints. A default of ... makes it required."""
    return Field(default, description=meaning, json_schema_extra={"source": source})
