"""How a caller says that a request should be learned from: one header, or one entry of the request's metadata.

The header `x-headwater-mark` holds labels, comma-separated, or a JSON object with
`labels`, `metadata`, `task_id` and `run_id`; empty is a mark without labels. In the
metadata of an OpenAI request `headwater_mark` holds labels in the same form, and the
other entries are the mark's metadata. Read by the node and written by the client
side, so nothing is imported here but the standard library and pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

HEADER = "x-headwater-mark"
METADATA_KEY = "headwater_mark"

MOST_LABELS, LONGEST_LABEL = 16, 64
MOST_ENTRIES, LONGEST_VALUE = 16, 512
LONGEST_ID = 256
_LONGEST_HEADER = 16_384
_IDS = ("task_id", "run_id")


@dataclass(frozen=True)
class Mark:
    """A wish that an exchange be learned from, and what is known about it."""

    labels: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    task_id: str = ""
    run_id: str = ""

    def header(self) -> str:
        """The value of `HEADER`; ASCII."""
        fields: dict[str, Any] = {"labels": self.labels, "metadata": dict(self.metadata)}
        fields |= {"task_id": self.task_id, "run_id": self.run_id}
        return json.dumps({name: value for name, value in fields.items() if value}, separators=(",", ":"))


def encodable(text: str) -> str:
    """Refuse half of a surrogate pair: JSON can carry it, no text can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("text is not valid Unicode") from error
    return text


Identifier = Annotated[str, Field(max_length=LONGEST_ID), AfterValidator(encodable)]
Label = Annotated[str, Field(min_length=1, max_length=LONGEST_LABEL), AfterValidator(encodable)]
Labels = Annotated[list[Label], Field(max_length=MOST_LABELS)]
_Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_Value = Annotated[str, Field(max_length=LONGEST_VALUE), AfterValidator(encodable)]


class MarkFields(BaseModel):
    """A mark as JSON; absent and null are the same."""

    model_config = ConfigDict(strict=True, extra="forbid")

    labels: Labels | None = None
    metadata: Annotated[dict[_Key, _Value], Field(max_length=MOST_ENTRIES)] | None = None
    task_id: Identifier | None = None
    run_id: Identifier | None = None

    def mark(self) -> Mark:
        return Mark(tuple(self.labels or ()), dict(self.metadata or {}), self.task_id or "", self.run_id or "")


def read_header(value: str) -> Mark:
    """The mark a header holds.

    Raises:
        ValueError: it is no mark; the message says why, without its text.
    """
    if len(value) > _LONGEST_HEADER:
        raise ValueError(f"longer than {_LONGEST_HEADER} characters")
    if not value.lstrip().startswith("{"):
        return _checked({"labels": _labels(value)})
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("not a JSON object") from error
    return _checked(fields)


def read_metadata(metadata: Mapping[str, str]) -> Mark | None:
    """The mark a request's metadata holds; None where it holds none.

    Raises:
        ValueError: it is no mark.
    """
    if METADATA_KEY not in metadata:
        return None
    rest = {key: value for key, value in metadata.items() if key not in (METADATA_KEY, *_IDS)}
    ids = {key: metadata[key] for key in _IDS if key in metadata}
    return _checked({"labels": _labels(metadata[METADATA_KEY]), "metadata": rest, **ids})


def _labels(text: str) -> list[str]:
    return [label for part in text.split(",") if (label := part.strip())]


def _checked(fields: Any) -> Mark:
    try:
        return MarkFields.model_validate(fields).mark()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error
