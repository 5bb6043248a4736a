"""The page at ``/``: three files, and headers that let them do nothing but talk with this server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["page_routes"]

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, in nobody's frame: a model's words could do nothing even as HTML.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """Where the page's files are found; they hold no secret, so no key is asked for them."""
    return [Route(path, _sender(name, kind), methods=["GET"]) for path, (name, kind) in _FILES.items()]


def _sender(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files(__package__).joinpath("web", name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return send
