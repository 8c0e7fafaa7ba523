"""The chat page at `/`: three files of this package, which a browser runs as any other client of the API.

The page has no access of its own. Where the API needs a key, its user types one in.
"""

import hashlib
from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response

FILES = {
    "/": ("chat.html", "text/html; charset=utf-8"),
    "/chat.css": ("chat.css", "text/css; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    # Nothing comes from elsewhere, nothing goes elsewhere, and no text becomes code, whatever a model writes.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_chat_page(app: FastAPI) -> None:
    folder = files("router.http").joinpath("assets")
    for path, (name, kind) in FILES.items():
        handler = _handler(folder.joinpath(name).read_bytes(), kind)
        app.add_api_route(path, handler, methods=["GET", "HEAD"], response_model=None)


def _handler(body: bytes, kind: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": tag}

    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return file
