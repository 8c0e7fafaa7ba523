"""Custom resources against the definitions (CRDs) that operators publish, as an API server validates them."""

import copy
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Document = dict[str, Any]

INT_OR_STRING = {"type": ["integer", "string"]}


def read_definitions(folder: Path) -> dict[tuple[str, str], dict[str, Document]]:
    """{(apiVersion, kind): {file: JSON schema}} of all CRDs below `folder`, each version that is served."""
    found: dict[tuple[str, str], dict[str, Document]] = {}
    for path in sorted(folder.rglob("*.y*ml")):
        for document in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
            if not document or document.get("kind") != "CustomResourceDefinition":
                continue
            spec = document["spec"]
            for version in spec["versions"]:
                if version["served"]:
                    key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    schema = strict(version["schema"]["openAPIV3Schema"])
                    schema["properties"].update(metadata={"type": "object"})
                    found.setdefault(key, {})[str(path.relative_to(folder))] = schema
    return found


def strict(schema: Document) -> Document:
    """The JSON schema of a structural schema, in which a field that the API server would drop is an error.

    Rules in CEL (`x-kubernetes-validations`) and formats are left out.
    https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
    """
    made = copy.copy(schema)
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("anyOf", None)
        made |= INT_OR_STRING
    if made.pop("nullable", False) and "type" in made:
        kinds = made["type"]
        made["type"] = [*(kinds if isinstance(kinds, list) else [kinds]), "null"]
    if "properties" in made:
        made["properties"] = {name: strict(one) for name, one in made["properties"].items()}
        if not made.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for name in ("items", "additionalProperties"):
        if isinstance(made.get(name), dict):
            made[name] = strict(made[name])
    return made


def complaints(document: Document, schema: Document) -> list[str]:
    """What the definition does not accept, a line each."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in errors]
