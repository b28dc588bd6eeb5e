"""Bad values in one line: what pydantic found wrong, said with the field's name, the value and what is allowed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

SIGNS = {annotated_types.Ge: ">=", annotated_types.Gt: ">", annotated_types.Le: "<=", annotated_types.Lt: "<"}


def allowed(annotation: Any, metadata: list[Any]) -> str:
    """What a field takes, e.g. "a number >= 0 and < 1" or "one of none, k1, k2, k3"."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section"
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return allowed(inner, [*extra, *metadata])
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " or ".join("null" if part is type(None) else allowed(part, []) for part in get_args(annotation))
    if origin in (list, tuple):
        least = next((m.min_length for m in metadata if isinstance(m, annotated_types.MinLen)), 0)
        most = next((m.max_length for m in metadata if isinstance(m, annotated_types.MaxLen)), None)
        return f"a list of {least}" if least == most else f"a list of {least} or more" if least else "a list"
    word = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(annotation, "a value")
    bounds = []
    for item in metadata:
        constraints = item.metadata if isinstance(item, FieldInfo) else [item]
        for constraint in constraints:
            for kind, sign in SIGNS.items():
                if isinstance(constraint, kind):
                    bounds.append(f"{sign} {getattr(constraint, kind.__name__.lower()):g}")
    return " ".join([word, " and ".join(bounds)]).strip()


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field that holds a section, optional or not."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def field_allowed(model: type[BaseModel], path: tuple[Any, ...]) -> str | None:
    """What the field at `path` of `model` takes; None if there is no such field."""
    name, *rest = path
    info = model.model_fields.get(name) if isinstance(name, str) else None
    if info is None:
        return None
    if rest and section_of(info.annotation):
        return field_allowed(section_of(info.annotation), tuple(rest))
    return allowed(info.annotation, info.metadata)


def one_line(where: str, model: type[BaseModel], error: ValidationError) -> str:
    """The first thing wrong in `error`, e.g. "openwebrl: eps_low = 1.5 is not allowed: a number >= 0 and < 1"."""
    first = error.errors(include_url=False)[0]
    path = tuple(first["loc"])
    name = ".".join(str(part) for part in path)
    if first["type"] == "extra_forbidden":
        parent = model
        for part in path[:-1]:
            parent = section_of(parent.model_fields[part].annotation)
        return f"{where}: unknown key {name}; allowed: {', '.join(parent.model_fields)}"
    if first["type"] == "missing":
        return f"{where}: {name} is missing: {field_allowed(model, path) or first['msg']}"
    if first["type"] == "value_error":
        return f"{where}: {first['ctx']['error']}"
    # A union reports one error per member, with the member's name at the end of the path.
    while path and field_allowed(model, path) is None:
        path = path[:-1]
    name = ".".join(str(part) for part in path) or name
    return f"{where}: {name} = {first['input']!r} is not allowed: {field_allowed(model, path) or first['msg']}"
