"""The page's files and how each is served.

Knows: paths, media types and headers. Does not know what the page shows.
"""

from dataclasses import dataclass
from importlib import resources

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
HEADERS = (("cache-control", "no-cache"), ("content-security-policy", POLICY), ("x-content-type-options", "nosniff"))


@dataclass(frozen=True, slots=True)
class Asset:
    """One file and its place."""

    path: str
    media_type: str
    content: bytes
    headers: tuple[tuple[str, str], ...] = HEADERS


def _read(name: str) -> bytes:
    return resources.files("router.gateway.status_page").joinpath(name).read_bytes()


ASSETS = (
    Asset("/", "text/html; charset=utf-8", _read("index.html")),
    Asset("/static/status.css", "text/css; charset=utf-8", _read("status.css")),
    Asset("/static/status.js", "text/javascript; charset=utf-8", _read("status.js")),
)
