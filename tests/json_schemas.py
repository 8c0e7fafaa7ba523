"""Random JSON schemas, of the keywords that structured output supports."""

from hypothesis import strategies as st

NAMES = ["a", "id", "name", "ünï", "with space", 'quo"te', "x-1"]
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "integer"}),
    st.just({"type": "number"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-2000, 2000),
        st.integers(0, 5000),
    ),
    st.builds(
        lambda low, size: {"type": "number", "exclusiveMinimum": low, "maximum": low + size},
        st.integers(-50, 50),
        st.integers(1, 99),
    ),
    st.builds(lambda n: {"type": "integer", "multipleOf": n}, st.sampled_from([2, 3, 5])),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 6),
        st.integers(0, 12),
    ),
    st.builds(
        lambda pattern: {"type": "string", "pattern": pattern},
        st.sampled_from(
            [
                "^[A-Z]{3}$",
                "^(yes|no)+$",
                r"^\d{3}-\d{4}$",
                "[a-f]?x",
                r"^\w{1,4}@\w{1,4}\.org$",
                r"^\S\s[^\"\n]$",
                r"^[\u4e00-\u9fff]{2}$",
            ]
        ),
    ),
    st.builds(
        lambda form: {"type": "string", "format": form},
        st.sampled_from(["date", "uuid", "ipv4", "date-time", "frob"]),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.one_of(st.integers(-9, 9), st.text(max_size=5), st.none(), st.booleans()),
            min_size=1,
            max_size=4,
            unique_by=repr,
        ),
    ),
    st.builds(lambda value: {"const": value}, st.sampled_from(["x", 7, None, [1, "b"], {"k": 1}])),
    st.just({"type": ["string", "null"]}),
    st.just({"minLength": 2}),
    st.just({"type": "string", "enum": ["red", "green", 3]}),
    st.just({"$ref": "#/$defs/node"}),
)
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
    "additionalProperties": False,
}


def _array(items, low, size):
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + size}


def _object(properties, wanted, others):
    required = [name for name, is_wanted in zip(properties, wanted, strict=False) if is_wanted]
    schema = {"type": "object", "properties": properties, "required": required}
    return schema if others is None else {**schema, "additionalProperties": others}


def _tagged(one, other):
    def branch(tag, value):
        return {
            "type": "object",
            "properties": {"kind": {"const": tag}, "value": value},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }

    return {"oneOf": [branch("one", one), branch("other", other)]}


def _composed(inner):
    return st.one_of(
        st.builds(_array, inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(
            lambda first, rest: {"type": "array", "prefixItems": first, "items": rest},
            st.lists(inner, min_size=1, max_size=3),
            st.one_of(inner, st.just(False)),
        ),
        st.builds(
            _object,
            st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
            st.lists(st.booleans(), max_size=4),
            st.sampled_from([False, False, None, {"type": "integer"}]),
        ),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"allOf": [one], "title": "one"}, inner),
        st.builds(_tagged, inner, inner),
        st.builds(lambda key: {"type": "object", "required": [key]}, st.sampled_from(NAMES)),
    )


SCHEMAS = st.recursive(LEAVES, _composed, max_leaves=8).map(lambda s: {**s, "$defs": {"node": NODE}})
