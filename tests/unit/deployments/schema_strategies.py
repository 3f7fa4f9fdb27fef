"""Values that a JSON schema of /openapi.json allows, and some that it does not, for hypothesis."""

import sys

from hypothesis import strategies as st

MAX_ENTRIES = 3
MAX_CHARACTERS = 8

# Whatever JSON can say.
JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=MAX_CHARACTERS),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=MAX_ENTRIES),
        st.dictionaries(st.text(max_size=MAX_CHARACTERS), inner, max_size=MAX_ENTRIES),
    ),
    max_leaves=6,
)


def valid_values(schema, resolve):
    """A strategy of values that a schema allows.

    ``resolve`` returns what a reference stands for; references lead in no circle.
    """
    schema = resolve(schema)
    if options := schema.get("anyOf"):
        return st.one_of(*(valid_values(option, resolve) for option in options))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    return _MAKERS[schema["type"]](schema, resolve)


def any_bodies(schema, resolve):
    """A strategy of bodies: allowed, allowed but for a few fields, or of any kind."""
    allowed = valid_values(schema, resolve)
    names = st.one_of(
        st.sampled_from(sorted(resolve(schema)["properties"])), st.text(max_size=MAX_CHARACTERS)
    )
    spoilt = st.builds(
        lambda body, fields: {**body, **fields},
        allowed,
        st.dictionaries(names, JSON_VALUES, min_size=1, max_size=2),
    )
    return st.one_of(allowed, spoilt, JSON_VALUES)


def _objects(schema, resolve):
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    fields = {name: valid_values(field, resolve) for name, field in properties.items()}
    known = st.fixed_dictionaries(
        {name: fields[name] for name in required},
        optional={name: fields[name] for name in fields.keys() - set(required)},
    )
    others = schema.get("additionalProperties")
    if not isinstance(others, dict):
        return known if fields else st.dictionaries(st.text(max_size=2), JSON_VALUES, max_size=2)
    names = schema.get("propertyNames", {})
    keys = (
        st.from_regex(names["pattern"], fullmatch=True, alphabet=st.characters(codec="ascii"))
        if ("pattern" in names)
        else st.text(max_size=min(names.get("maxLength", MAX_CHARACTERS), MAX_CHARACTERS))
    )
    return st.dictionaries(keys, valid_values(others, resolve), max_size=MAX_ENTRIES)


def _lists(schema, resolve):
    least = schema.get("minItems", 0)
    most = min(schema.get("maxItems", least + MAX_ENTRIES), least + MAX_ENTRIES)
    return st.lists(valid_values(schema["items"], resolve), min_size=least, max_size=most)


def _strings(schema, _resolve):
    if "pattern" in schema:
        return st.from_regex(schema["pattern"].removesuffix("$") + r"\Z", fullmatch=True)
    least = schema.get("minLength", 0)
    most = min(schema.get("maxLength", least + MAX_CHARACTERS), least + MAX_CHARACTERS)
    return st.text(min_size=least, max_size=most)


def _integers(schema, _resolve):
    least, most = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMaximum" in schema:
        most = schema["exclusiveMaximum"] - 1
    # Small ones are what requests have.
    small = st.integers(
        min_value=0 if least is None else max(least, 0), max_value=_cap(least, most)
    )
    return st.one_of(small, st.integers(min_value=least, max_value=most))


def _cap(least, most):
    cap = max(least or 0, 0) + 4
    return cap if most is None else min(cap, most)


def _numbers(schema, _resolve):
    least = schema.get("minimum", schema.get("exclusiveMinimum", -10.0))
    most = schema.get("maximum", schema.get("exclusiveMaximum", 10.0))
    return st.floats(
        min_value=least + sys.float_info.epsilon * ("exclusiveMinimum" in schema),
        max_value=most,
        exclude_max="exclusiveMaximum" in schema,
    )


_MAKERS = {
    "object": _objects,
    "array": _lists,
    "string": _strings,
    "integer": _integers,
    "number": _numbers,
    "boolean": lambda _schema, _resolve: st.booleans(),
    "null": lambda _schema, _resolve: st.none(),
}
