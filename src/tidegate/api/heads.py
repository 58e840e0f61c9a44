"""What the head of a request may be. Whatever two readers could understand in two ways is refused, on every way in.

A proxy and this server must agree where a request ends and whose it is. The parser below refuses most of what they
could disagree about; this is the rest.
"""

from __future__ import annotations

from tidegate.api.problems import Problem

MAX_HEAD_BYTES = 32 * 1024
Headers = list[tuple[bytes, bytes]]

# Of each, one reader would take the first and another the last.
_ONCE = frozenset(
    {
        b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"host",
        b"transfer-encoding",
    }
)  # fmt: skip


def refusal(method: bytes, version: str, url: bytes, headers: Headers) -> Problem | None:
    """Why this head is not taken; None when it is."""
    size, seen, coding = len(url), set[bytes](), None
    for name, value in headers:
        size += len(name) + len(value) + 4
        if name in _ONCE:
            if name in seen:
                return Problem(400, f"the header {name.decode()} is given more than once; send it once")
            seen.add(name)
            if name == b"transfer-encoding":
                coding = value
    if size > MAX_HEAD_BYTES:
        return too_large()
    if version not in ("1.1", "1.0"):
        return Problem(400, "the request is not of HTTP/1.1")
    if coding is not None and (coding.strip().lower() != b"chunked" or version == "1.0"):
        return Problem(400, "of the transfer encodings only chunked is taken, in HTTP/1.1; or send Content-Length")
    if method == b"CONNECT":
        return Problem(405, "CONNECT is not possible here; this is no proxy")
    return None


def too_large() -> Problem:
    return Problem(431, f"the address and the headers are larger than {MAX_HEAD_BYTES} bytes")


def without_upgrade(method: bytes, version: str, url: bytes, headers: Headers) -> bytes:
    """The head again, without the header that asks for another protocol."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(lines))
