"""What hf-grow exports, as JSON: run by hand at a release, so that later versions are held to it.

python tests/released/write_names.py > tests/released/names-VERSION.json
"""

import ast
import dataclasses
import inspect
import json
from typing import Any

import hf_grow


def exported_names() -> dict[str, dict[str, Any]]:
    """Every exported name with its kind, and how it can be called."""
    return {name: described(getattr(hf_grow, name)) for name in sorted(hf_grow.__all__)}


def described(value: Any) -> dict[str, Any]:
    """A class, a function or a value in plain words; signatures as they would be written, without types."""
    if inspect.isclass(value):
        return {"kind": "class"} | _class(value)
    if inspect.isfunction(value):
        return {"kind": "function", "signature": signature_text(inspect.signature(value))}
    return {"kind": "value"}


def _class(cls: type) -> dict[str, Any]:
    own = [ancestor for ancestor in cls.__mro__ if ancestor.__module__.startswith("hf_grow")]
    foreign = {base.__name__ for ancestor in own for base in ancestor.__bases__} - {"object"}
    content: dict[str, Any] = {"bases": ", ".join(sorted(foreign - {ancestor.__name__ for ancestor in own}))}
    if any("__init__" in vars(ancestor) for ancestor in own):
        content["signature"] = signature_text(inspect.signature(cls))
    if dataclasses.is_dataclass(cls):
        content["fields"] = ", ".join(field.name for field in dataclasses.fields(cls))
    names = sorted({name for ancestor in own for name in vars(ancestor) if not name.startswith("_")})
    members = {name: _member(cls, name) for name in names}
    content["members"] = {name: member for name, member in members.items() if member is not None}
    return {name: part for name, part in content.items() if part}


def _member(cls: type, name: str) -> str | None:
    """A property, or the signature of a method without `self`; None for the default of a field."""
    member = inspect.getattr_static(cls, name)
    if isinstance(member, property):
        return "property"
    if isinstance(member, (classmethod, staticmethod)):
        return signature_text(inspect.signature(getattr(cls, name)))
    if inspect.isfunction(member):
        signature = inspect.signature(member)
        return signature_text(signature.replace(parameters=list(signature.parameters.values())[1:]))
    return None


def signature_text(signature: inspect.Signature) -> str:
    """A signature without types; `...` stands for a default that is no plain value."""
    parameters = [_plain(parameter) for parameter in signature.parameters.values()]
    return str(inspect.Signature(parameters))


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if default is not parameter.empty and not _is_literal(default):
        default = ...
    # Its repr would be "Ellipsis".
    shown = _Dots() if default is ... else default
    return parameter.replace(annotation=parameter.empty, default=shown)


class _Dots:
    def __repr__(self) -> str:
        return "..."


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


if __name__ == "__main__":
    print(json.dumps(exported_names(), indent=1))
