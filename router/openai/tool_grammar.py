"""Grammars of tool calls: a forced call is a JSON schema, strict functions are a structural tag. Pure."""

from typing import Any

import orjson

from baton.core.errors import ClientError
from baton.core.sampling import Grammar
from engine.structured.schemas import check_schema
from router.openai.response_format import schema_grammar, structural_grammar
from router.text.conversation import Tool, ToolMode, ToolUse
from router.text.parsers.select import GENERIC

STRICT_PARSERS = frozenset({"hermes", GENERIC})
"""Formats whose calls are plain text with JSON in it, so that a structural tag can describe them."""


def tool_grammar(tools: ToolUse, parser: str) -> Grammar | None:
    """Return the grammar of the calls that the request allows, or None where anything goes. Raises
    ClientError for schemas that cannot be enforced where they must be."""
    match tools.mode:
        case ToolMode.NONE:
            return None
        case ToolMode.NAMED | ToolMode.REQUIRED if parser == GENERIC:
            return _forced_tags(tools)
        case ToolMode.NAMED:
            (tool,) = tools.allowed
            return schema_grammar(tool.parameters, _where(tools, tool))
        case ToolMode.REQUIRED:
            return _required(tools)
        case ToolMode.AUTO:
            return _strict(tools, parser) if any(tool.is_strict for tool in tools.tools) else None


def _where(tools: ToolUse, tool: Tool) -> str:
    return f"tools[{tools.tools.index(tool)}].function.parameters"


def _required(tools: ToolUse) -> Grammar:
    """Return the grammar of a list of calls, each with a name and the parameters of that function."""
    definitions: dict[str, Any] = {}
    branches: list[dict[str, Any]] = []
    for number, tool in enumerate(tools.tools):
        checked = check_schema(tool.parameters, _where(tools, tool))
        parameters = _moved(checked, number, definitions)
        branches.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": branches}}
    if not tools.is_parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    # The worker judges the whole: functions count together, and are nested deeper here.
    return schema_grammar(schema, "tools")


def _moved(schema: Any, number: int, definitions: dict[str, Any]) -> Any:
    """Return the schema as part of a larger one. Its definitions move to the new root, under names of their
    own."""
    if not isinstance(schema, dict):
        return schema
    inner = dict(schema)
    for keyword in ("$defs", "definitions"):
        for name, one in inner.pop(keyword, {}).items():
            definitions[f"{number}_{keyword.strip('$')}_{name}"] = _renamed(one, number)
    moved = _renamed(inner, number)
    if '"#"' in orjson.dumps(schema).decode():
        definitions[f"{number}_root"] = moved
        return {"$ref": f"#/$defs/{number}_root"}
    return moved


def _renamed(node: Any, number: int) -> Any:
    if isinstance(node, list):
        return [_renamed(one, number) for one in node]
    if not isinstance(node, dict):
        return node
    found = {key: _renamed(value, number) for key, value in node.items()}
    ref = node.get("$ref")
    if isinstance(ref, str):
        if ref == "#":
            found["$ref"] = f"#/$defs/{number}_root"
        else:
            for keyword in ("$defs", "definitions"):
                prefix = f"#/{keyword}/"
                if ref.startswith(prefix):
                    found["$ref"] = f"#/$defs/{number}_{keyword.strip('$')}_{ref[len(prefix) :]}"
    return found


def _strict(tools: ToolUse, parser: str) -> Grammar:
    if parser not in STRICT_PARSERS:
        at = next(i for i, tool in enumerate(tools.tools) if tool.is_strict)
        raise ClientError(
            "strict cannot be enforced in this model's tool call format while tool_choice is auto; leave it "
            "out, or use tool_choice 'required'",
            param=f"tools[{at}].function.strict",
            code="unsupported_parameter",
        )
    schemas = [tool.parameters if tool.is_strict else {"type": "object"} for tool in tools.tools]
    tags = [_tag(tool, schema) for tool, schema in zip(tools.tools, schemas, strict=True)]
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    return structural_grammar({"type": "structural_tag", "format": form}, "tools")


def _forced_tags(tools: ToolUse) -> Grammar:
    """Return the grammar of one call or more in the form that the prompt of `generic_tools` asks for. A model
    writes what it has just been told more reliably than a list that nobody mentioned."""
    tags = [_tag(tool, check_schema(tool.parameters, _where(tools, tool))) for tool in tools.allowed]
    form = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": tools.mode is ToolMode.NAMED or not tools.is_parallel,
    }
    return structural_grammar({"type": "structural_tag", "format": form}, "tools")


def _tag(tool: Tool, schema: Any) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{tool.name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }
