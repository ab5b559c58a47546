"""JSON schemas, closed: an object has the properties its schema names and no others, unless the schema allows more.

JSON Schema itself lets any object have any other property; what a client means by naming three is three. So
`additionalProperties: false` is added wherever `properties` are named and nothing is said of others, as xgrammar and
llama.cpp read a schema. Where several schemas describe one object (`allOf`, `anyOf`, `$ref` with siblings), each knows
the names of the others, so that closing one does not forbid what another asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moesaic.errors import UserError

MAX_NODES = 20_000  # subschemas, and visits of them
MAX_DEPTH = 60
MAX_PROPERTIES = 1000  # of one object
FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
}  # that llguidance enforces; a format is an annotation otherwise
UNIONS = ("anyOf", "oneOf")
OBJECT = ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")
ARRAY = ("items", "prefixItems", "minItems", "maxItems")
TYPED = {"type", *UNIONS, "enum", "const", "not", "if"}  # with one of these, what a schema is for is not ours to guess
LISTS = ("prefixItems",)  # of schemas
NAMED = ("$defs", "definitions")  # schemas by name
Names = frozenset[str]
NONE: Names = frozenset()


@dataclass(frozen=True)
class Closed:
    """`open`: some object in it may have keys that the schema does not name."""

    schema: Any
    open: bool


def closed(schema: Any, place: str) -> Closed:
    closer = _Closer(schema, place)
    found = closer.close(schema, 0)
    if closer.copies:
        found = {**found, "$defs": {**found.get("$defs", {}), **closer.copies}}
    return Closed(found, closer.open)


class _Closer:
    def __init__(self, root: Any, place: str) -> None:
        self.root, self.place = root, place
        self.open = False
        self.visits = 0
        # Of definitions that are one of several schemas of an object: how they are called, and what they are.
        self.called: dict[tuple[str, Names, bool], str] = {}
        self.copies: dict[str, Any] = {}

    def close(self, node: Any, depth: int, beside: Names = NONE, loose: bool = False, part: bool = False) -> Any:
        """`beside`: names that other schemas of the same object have; `loose`: one of them allows any. A `part` is one
        of several schemas of the same value."""
        self._visit(depth)
        if not isinstance(node, dict):
            self.open |= node is True
            return node
        node = self._plain(node, depth, part)
        if isinstance(given := node.get("properties"), dict) and len(given) > MAX_PROPERTIES:
            raise UserError(self.place, f"has an object of more than {MAX_PROPERTIES} properties", "Make it simpler.")
        total = beside | self._names(node, depth)
        loose_here = loose or self._allows(node, depth, unions=True)
        closes = ("properties" in node or "patternProperties" in node) and "additionalProperties" not in node
        closes = closes and not loose_here
        found: dict[str, Any] = {}
        for key, value in node.items():
            found[key] = self._keyword(key, value, node, depth, beside, total, loose, loose_here)
        if closes:
            others = {name: True for name in sorted(total - set(node.get("properties", ())))}
            found["properties"] = {**found.get("properties", {}), **others}
            found["additionalProperties"] = False
            self.open |= any(name not in self._names(node, depth, "properties") for name in total)
        self.open |= _takes_any_key(found)
        return found

    def _keyword(
        self, key: str, value: Any, node: dict[str, Any], depth: int, beside: Names, total: Names, *loose: bool
    ) -> Any:
        inherited, here = loose
        if key == "$ref" and isinstance(value, str):
            return self._reference(value, depth, total if _has_siblings(node) else beside, here)
        if key == "allOf" and isinstance(value, list):
            return [self.close(each, depth + 1, total, here, part=True) for each in value]
        if key in UNIONS and isinstance(value, list):
            base = {name: given for name, given in node.items() if name != key}
            names = beside | self._names(base, depth)
            free = inherited or self._allows(base, depth, unions=False)
            # Alone, a branch is all there is of the value.
            part = any(name in base for name in (*OBJECT, *ARRAY, "type", "allOf", "$ref", *UNIONS))
            return [self.close(each, depth + 1, names, free, part=part) for each in value]
        if key in ("properties", "patternProperties", *NAMED) and isinstance(value, dict):
            return {name: self.close(each, depth + 1) for name, each in value.items()}
        if key in LISTS or (key == "items" and isinstance(value, list)):
            return [self.close(each, depth + 1) for each in value] if isinstance(value, list) else value
        if key in ("items", "additionalProperties", "additionalItems") and isinstance(value, dict):
            return self.close(value, depth + 1)
        return value

    def _reference(self, reference: str, depth: int, names: Names, loose: bool) -> str:
        """A definition that stands alone is closed where it is; one beside others, in a copy that knows them."""
        if not names - self._names({"$ref": reference}, depth) and not loose:
            return reference
        key = (reference, names, loose)
        if key not in self.called:
            target = self._target(reference)
            if not isinstance(target, dict):
                return reference
            name = self.called[key] = f"{reference.rsplit('/', 1)[-1]}-beside-{len(self.called)}"
            self.copies[name] = self.close(target, depth + 1, names, loose, part=True)
        return f"#/$defs/{self.called[key].replace('~', '~0').replace('/', '~1')}"

    def _plain(self, node: dict[str, Any], depth: int, part: bool) -> dict[str, Any]:
        """Other ways to say what llguidance knows one way to say."""
        node = dict(node)
        if isinstance(given := node.get("format"), str) and given not in FORMATS:
            del node["format"]
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        others = node.pop("unevaluatedProperties", None)
        if others is not None and "additionalProperties" not in node:
            if others is not False:
                node["additionalProperties"] = others
            else:
                node.setdefault("properties", {})
        _take_property_names(node)
        if not part and "$ref" not in node:  # what is referred to has a type of its own
            said = {key for each in self._in_place(node, depth, unions=False) for key in each}
            kinds = [kind for kind, keys in (("object", OBJECT), ("array", ARRAY)) if said & set(keys)]
            if len(kinds) == 1 and not said & TYPED:
                node["type"] = kinds[0]
        return node

    # What a schema says of its own value, here and in the schemas that stand for it

    def _names(self, node: Any, depth: int, *keys: str) -> Names:
        names: set[str] = set()
        for each in self._in_place(node, depth, unions=True):
            for key in keys or ("properties", "required"):
                if isinstance(given := each.get(key), dict | list):
                    names.update(name for name in given if isinstance(name, str))
        return frozenset(names)

    def _allows(self, node: Any, depth: int, *, unions: bool) -> bool:
        keys = ("additionalProperties", "unevaluatedProperties")
        return any(
            each.get(key, False) is not False for each in self._in_place(node, depth, unions=unions) for key in keys
        )

    def _in_place(self, node: Any, depth: int, *, unions: bool) -> Iterator[dict[str, Any]]:
        """The schema and those that describe the same value."""
        waiting, seen = [node], set[str]()
        while waiting:
            each = waiting.pop()
            if not isinstance(each, dict):
                continue
            self._visit(depth)
            yield each
            if isinstance(reference := each.get("$ref"), str) and reference not in seen:
                seen.add(reference)
                waiting.append(self._target(reference))
            for key in ("allOf", *(UNIONS if unions else ())):
                if isinstance(each.get(key), list):
                    waiting += each[key]

    def _target(self, reference: str) -> Any:
        """None if there is none; only places in the schema itself are looked for."""
        if not reference.startswith("#"):
            return None
        found: Any = self.root
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdigit() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found

    def _visit(self, depth: int) -> None:
        self.visits += 1
        if depth > MAX_DEPTH:
            raise UserError(self.place, f"is nested more than {MAX_DEPTH} levels deep", "Make it simpler.")
        if self.visits > MAX_NODES:
            raise UserError(self.place, "has too many subschemas", "Make it simpler.")


def _takes_any_key(node: dict[str, Any]) -> bool:
    """Whether an object of this schema may have keys it does not name."""
    kinds = node.get("type")
    if any(key in node for key in ("$ref", "enum", "const", "allOf", *UNIONS)) and kinds is None:
        return "patternProperties" in node
    object_ = kinds is None or kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return object_ and (node.get("additionalProperties", True) is not False or "patternProperties" in node)


def _has_siblings(node: dict[str, Any]) -> bool:
    return any(key in node for key in ("properties", "required", "allOf", *UNIONS))


def _take_property_names(node: dict[str, Any]) -> None:
    """`propertyNames` as properties or patterns, where there are no other properties."""
    names = node.get("propertyNames")
    if not isinstance(names, dict) or node.get("properties") or node.get("patternProperties"):
        return
    said = {key: value for key, value in names.items() if key not in ("type", "title", "description")}
    value = node.get("additionalProperties", True)
    if not said:
        node["additionalProperties"] = value
    elif list(said) == ["enum"] and isinstance(said["enum"], list):
        node["properties"] = {name: value for name in said["enum"] if isinstance(name, str)}
        node["additionalProperties"] = False
    elif list(said) == ["pattern"] and isinstance(said["pattern"], str):
        node["patternProperties"] = {said["pattern"]: value}
        node["additionalProperties"] = False
    else:
        return
    del node["propertyNames"]
