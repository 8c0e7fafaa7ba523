"""Random JSON schemas made of the keywords that structured output supports."""

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
        lambda n, low: {
            "type": ["number", "null"],
            "multipleOf": n,
            "minimum": low,
            "exclusiveMaximum": low + 40,
        },
        st.sampled_from([2, 3.0, 7]),
        st.integers(-30, 9),
    ),
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
                r"^[0-9]+(\.[0-9]+)?$",
                "^é([^é]|aa?)?$",
            ]
        ),
    ),
    st.builds(
        lambda form: {"type": "string", "format": form},
        st.sampled_from(["date", "uuid", "ipv4", "date-time", "email", "json-pointer"]),
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
        st.builds(
            lambda known, closing: {"type": "object", "properties": known, closing: False},
            st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
            st.sampled_from(["additionalProperties", "unevaluatedProperties"]),
        ),
        st.builds(
            lambda known, others: {"properties": known, "patternProperties": {"^z[a-z]$": others}},
            st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
            inner,
        ),
        st.builds(
            lambda first, size: {
                "type": "array",
                "prefixItems": first,
                "unevaluatedItems": False,
                "maxItems": size,
            },
            st.lists(inner, min_size=1, max_size=3),
            st.integers(1, 4),
        ),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"allOf": [one], "title": "one"}, inner),
        st.builds(_tagged, inner, inner),
        st.builds(lambda key: {"type": "object", "required": [key]}, st.sampled_from(NAMES)),
    )


SCHEMAS = st.recursive(LEAVES, _composed, max_leaves=8).map(lambda s: {**s, "$defs": {"node": NODE}})

# Schemas of any keywords side by side, most of which have to be refused.
_NUMBERS = st.sampled_from([-3, 0, 1, 2, 5, 2.5, 3.0, 0.001, 1e-7, 1e20, 2**62, 2**63, True])
_COUNTS = st.sampled_from([0, 1, 2, 3, 2.0, -1])
_VALUES = st.sampled_from([None, True, 0, 1, 1.0, 2.5, 2**64, "", "a", "ab", [], [1, "a"], {"a": 1}])
_PATTERNS = st.sampled_from(
    ["^a+$", "a|b", "^x-", "(^a|b$)", "x(^a)", "^[^a]{2}$", "^(a(b)*)?$", '"', "(?=a)"]
)
_WORDS = ["a", "b", "x-a", "é", 'q"']


def _wild(inner):
    named = st.dictionaries(st.sampled_from(_WORDS), inner, max_size=3)
    several = st.lists(inner, min_size=1, max_size=3)
    kinds = st.sampled_from(["string", "number", "integer", "boolean", "null", "array", "object"])
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(kinds, st.lists(kinds, min_size=1, max_size=2)),
            "enum": st.lists(_VALUES, min_size=1, max_size=4),
            "const": _VALUES,
            **dict.fromkeys(
                ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"], _NUMBERS
            ),
            **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems"], _COUNTS),
            **dict.fromkeys(["minProperties", "maxProperties"], _COUNTS),
            "pattern": _PATTERNS,
            "format": st.sampled_from(["date", "email", "frob"]),
            "properties": named,
            "patternProperties": st.dictionaries(_PATTERNS, inner, max_size=2),
            "propertyNames": inner,
            "required": st.lists(st.sampled_from(_WORDS), max_size=3),
            "dependentRequired": st.dictionaries(
                st.sampled_from(_WORDS), st.lists(st.sampled_from(_WORDS), max_size=2), max_size=2
            ),
            **dict.fromkeys(["additionalProperties", "unevaluatedProperties", "unevaluatedItems"], inner),
            "items": inner,
            "prefixItems": several,
            "uniqueItems": st.booleans(),
            **dict.fromkeys(["anyOf", "oneOf", "allOf"], several),
            "not": inner,
            "$ref": st.sampled_from(
                ["#", "#/$defs/node", "#/$defs/node/properties/v", "#/properties/a", "#/nowhere"]
            ),
        },
    ).flatmap(_thinned)


def _thinned(schema):
    """A few of the keywords, so that some schemas are taken."""
    if not isinstance(schema, dict) or len(schema) < 2:
        return st.just(schema)
    return st.lists(st.sampled_from(sorted(schema)), min_size=1, max_size=3, unique=True).map(
        lambda keys: {key: schema[key] for key in keys}
    )


WILD_SCHEMAS = st.recursive(
    st.one_of(
        st.booleans(), st.sampled_from([{"type": "integer"}, {"type": "string"}, {"type": "null"}, {}])
    ),
    _wild,
    max_leaves=6,
).map(lambda s: {**s, "$defs": {"node": NODE}} if isinstance(s, dict) else s)
