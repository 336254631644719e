"""A [student] table: the kind of a student, and the fields of that kind's configuration, checked when it is read."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from fpld.errors import InputError
from fpld.registry import students
from fpld.students.configs import config_class

if TYPE_CHECKING:
    from collections.abc import Mapping

Device = Literal["cpu", "cuda", "auto"]


@dataclass(frozen=True, slots=True)
class StudentChoice:
    """A kind of student, its configuration (a frozen dataclass; V is not known yet), and where it is computed."""

    kind: str
    settings: Any
    device: Device = "cpu"

    def changed(self, **settings: Any) -> StudentChoice:
        """Return the same choice with other settings.

        >>> parse({"kind": "ngram", "order": 2}).changed(order=4).settings.order
        4
        """
        return replace(self, settings=replace(self.settings, **settings))

    def table(self) -> dict[str, Any]:
        """Return the table that `parse` makes this choice of."""
        settings = {name: value for name, value in asdict(self.settings).items() if name != "vocab"}
        return {"kind": self.kind, "device": self.device, **settings}


def parse(table: Any) -> StudentChoice:
    """Check a [student] table; every error names the field.

    >>> parse({"kind": "transformer", "width": 64}).settings.width
    64
    """
    if isinstance(table, StudentChoice):
        return table
    if not isinstance(table, dict):
        raise InputError(f"must be a table with a kind, got {table!r}")
    given = dict(table)
    if "kind" not in given:
        raise _refusal({"kind": f"is missing: one of {', '.join(students.names())}"}, given)
    kind = str(given.pop("kind"))
    try:
        students.check(kind)
    except InputError as error:
        raise _refusal({"kind": str(error)}, table) from None
    device = _checked({"device": Device}, {"device": given.pop("device", "cpu")})["device"]
    return StudentChoice(kind, _settings(kind, given), device)


def _settings(kind: str, given: dict[str, Any]) -> Any:
    """Return the kind's configuration; V is left open, since the tokenizer decides it."""
    cls = config_class(kind)
    own = {field.name: field for field in fields(cls) if field.name != "vocab"}
    unknown = f"unknown key: a student of kind {kind!r} has {', '.join(sorted(own))}"
    if given.keys() - own.keys():
        raise _refusal(dict.fromkeys(sorted(given.keys() - own.keys()), unknown), given)
    needed = {name for name, field in own.items() if field.default is MISSING and field.default_factory is MISSING}
    if needed - given.keys():
        raise _refusal(dict.fromkeys(sorted(needed - given.keys()), "is missing"), given)
    checked = _checked(get_type_hints(cls), given)
    try:
        return cls(**checked)
    except InputError as error:
        name, _, rest = str(error).partition(" ")  # as in `width must be a multiple of ...`
        place, message = (name, rest) if name in own and rest.startswith("must") else ("", str(error))
        raise _refusal({place: message}, given) from None


def _checked(types: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that have their types, converting nothing; all that do not are named."""
    found, wrong = {}, {}
    for name, value in given.items():
        try:
            found[name] = TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            wrong[name] = error.errors()[0]["msg"]
    if wrong:
        raise _refusal(wrong, given)
    return found


def _refusal(messages: Mapping[str, str], given: Mapping[str, Any]) -> ValidationError:
    """Return an error with a line for each field; what no field is named for is of the whole table."""
    lines = []
    for name, message in messages.items():
        kind = PydanticCustomError("student", "{message}", {"message": message})
        lines.append(InitErrorDetails(type=kind, loc=(name,) if name else (), input=given.get(name, given)))
    return ValidationError.from_exception_data("student", lines)
