"""What every option of the configuration is made of: a type, a meaning and a source."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool


def _refuse_huge(value: int) -> int:
    if value > LARGEST:
        raise ValueError(f"expected at most {LARGEST:,}")
    return value


def _check_name(value: str) -> str:
    if not value.strip():
        raise ValueError("expected some text, got none")
    return value


LARGEST = 2**63  # 64 bits hold every number below
# Strict: Python counts True as 1, and 8.0 is more likely meant for another option than a count.
Number = Annotated[float, Field(strict=True)]
NonNegative = Annotated[float, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True)]
Whole = Annotated[int, Field(ge=0, strict=True), AfterValidator(_refuse_huge)]
Count = Annotated[int, Field(ge=1, strict=True), AfterValidator(_refuse_huge)]
Several = Annotated[Count, Field(le=1_000_000)]  # of what is listed one by one
Flag = StrictBool
Text = Annotated[str, Field(max_length=4000), AfterValidator(_check_name)]


class Options(BaseModel):
    """A group of options: unknown keys, infinities and later changes are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def option(default: Any, meaning: str, source: str = "") -> Any:
    """Return a field with what `flowrl explain` prints. A default of ... makes it required."""
    return Field(default, description=meaning, json_schema_extra={"source": source})
