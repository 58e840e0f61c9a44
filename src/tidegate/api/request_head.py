"""What the head of a request may be. Whatever two readers could understand in two ways is refused, on every way in.

A proxy and this server must agree where a request ends and whose it is. The parser below refuses most of what they
could disagree about; this is the rest.
"""

from __future__ import annotations

import httptools

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

_LINES_END = "a line does not end with CR LF"
_ADDRESS = "its address is no path, or holds a character that must be percent-encoded"
# What is wrong, for what the parser says where that is less than a sender needs to know.
_FAULTS = {
    "Invalid method encountered": "it does not begin with a method of HTTP, such as GET or POST",
    "Expected HTTP/, RTSP/ or ICE/": "its first line does not end with HTTP/1.1; is there a space in the address?",
    "Invalid HTTP version": "its version is not HTTP/1.1",
    "Pause on PRI/Upgrade": "it is of HTTP/2, which is not spoken here; send HTTP/1.1",
    "Invalid header token": "the name of a header is empty or holds what no name may, such as a space before the colon",
    "Unexpected whitespace after header value": "the value of a header goes on in a second line; send it in one",
    "Unexpected space after start line": "the first header begins with a space",
    "Invalid header value char": "the value of a header holds a control character",
    "Invalid header field char": _LINES_END,
    "Expected CRLF after version": _LINES_END,
    "Missing expected CR after header value": _LINES_END,
    "Missing expected LF after header value": _LINES_END,
    "Expected LF after headers": _LINES_END,
    "Invalid character in Content-Length": "content-length is not a number; send it once, in decimal digits",
}
_TLS = "it is TLS, and this port speaks plain HTTP; use http://, or the address of the proxy that speaks TLS"
_TLS_HANDSHAKE = 0x16


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
    if version == "1.1":
        if b"host" not in seen:
            return Problem(400, "the header host is missing; a request of HTTP/1.1 names the host that it is for")
    elif version != "1.0":
        return Problem(400, f"HTTP/{version} is not spoken here; send HTTP/1.1")
    if coding is not None and (coding.strip().lower() != b"chunked" or version == "1.0"):
        return Problem(400, "of the transfer encodings only chunked is taken, in HTTP/1.1; or send Content-Length")
    if method == b"CONNECT":
        return Problem(405, "CONNECT is not possible here; this is no proxy")
    return None


def too_large() -> Problem:
    return Problem(431, f"the address and the headers are larger than {MAX_HEAD_BYTES} bytes")


def unreadable(fault: httptools.HttpParserError, data: bytes) -> Problem:
    """Why the bytes are refused that the parser stopped at; in our words or its own, never in those of the sender."""
    cause = fault.__context__  # what reading the head raised
    if isinstance(cause, Problem):
        return cause
    if isinstance(fault, httptools.HttpParserInvalidMethodError) and data[0] == _TLS_HANDSHAKE:
        what = _TLS
    elif any(isinstance(one, httptools.HttpParserInvalidURLError) for one in (fault, cause)):
        what = _ADDRESS
    else:
        what = _FAULTS.get(str(fault), str(fault))
    return Problem(400, f"the request cannot be read: {what}")


def without_upgrade(method: bytes, version: str, url: bytes, headers: Headers) -> bytes:
    """The head again, without the header that asks for another protocol."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(lines))
