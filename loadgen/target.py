"""A server to send requests to, and the bytes of a request for it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import httpx
import orjson

from baton.core.errors import SetupError
from loadgen.client import ServerUrl, request_bytes
from loadgen.lengths import PlannedRequest

PROBE_TIMEOUT_S = 10.0


class Api(StrEnum):
    COMPLETIONS = "completions"
    COMPLETIONS_TEXT = "completions-text"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """A server that answered, and the name of its model."""

    server: ServerUrl
    model: str
    api: Api
    vocab_size: int | None
    """The vocabulary size, if the server reports it."""
    is_baton: bool = False
    """True if the server reports to be Baton; it is then asked for timings."""
    openai_only: bool = False
    """Send no field beyond OpenAI's own API, because strict servers refuse others."""

    def message(self, request: PlannedRequest, prompt: object, *, api_key: str | None = None) -> bytes:
        """The bytes of one request.

        `prompt` is token ids, text, or the messages of a chat, as `api` requires. `api_key` None uses the
        server's key.
        """
        body: dict[str, object] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "messages" if self.api is Api.CHAT else "prompt": prompt,
        }
        if not self.openai_only:
            body["ignore_eos"] = True
            if self.api is Api.COMPLETIONS:
                body["return_token_ids"] = True  # otherwise a token without visible text has no instant
        if self.is_baton:
            body["baton"] = {"timings": True}
        headers = {"x-baton-slo-class": request.slo_class} if request.slo_class else {}
        path = "/v1/chat/completions" if self.api is Api.CHAT else "/v1/completions"
        packed = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return request_bytes(self.server, path, packed, api_key=api_key, headers=headers)


def probe(server: ServerUrl, *, model: str, api: Api, openai_only: bool = False) -> ReplayTarget:
    """Ask the server for its model. Raises SetupError if the server is unreachable, names no model, or is a
    Baton without this one."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    try:
        answer = httpx.get(f"{server.origin}/v1/models", headers=headers, timeout=PROBE_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise SetupError(f"cannot reach {server.origin}: {error}") from None
    listed = _models(answer)
    chosen = next((m for m in listed if m.get("id") == model), listed[0] if listed else {})
    name = str(chosen.get("id", ""))
    own = [str(m["id"]) for m in listed if not m.get("parent")]
    if not model and len(own) > 1:
        raise SetupError(f"{server.origin} has several models: choose one with --model: {', '.join(own)}")
    if not model and not name:
        raise SetupError(f"{server.origin}/v1/models {_complaint(answer)}")
    names = [str(m["id"]) for m in listed]
    if model and model not in names and any(m.get("owned_by") == "baton" for m in listed):
        raise SetupError(f"{server.origin} has no model {model}; choose one with --model: {', '.join(names)}")
    vocab_size = chosen.get("vocab_size")
    return ReplayTarget(
        server,
        model or name,
        api,
        vocab_size if isinstance(vocab_size, int) else None,
        is_baton=chosen.get("owned_by") == "baton" and not openai_only,
        openai_only=openai_only,
    )


def _complaint(answer: httpx.Response) -> str:
    """An error text for an answer that names no model."""
    if answer.status_code in (401, 403):
        return f"names no model ({answer.status_code}); give a valid --api-key"
    kind = answer.headers.get("content-type", "").partition(";")[0].strip() or "nothing that has a type"
    if answer.status_code == 200 and kind != "application/json":
        return f"answers {kind}, not a list of models: is --url a server that speaks OpenAI's API?"
    return f"names no model ({answer.status_code}); give --model"


def _models(answer: httpx.Response) -> list[dict[str, object]]:
    try:
        listed = cast("object", answer.json()["data"])
    except (ValueError, LookupError, TypeError):
        return []
    if not isinstance(listed, list):
        return []
    entries = cast("list[object]", listed)
    return [cast("dict[str, object]", m) for m in entries if isinstance(m, dict) and "id" in m]
