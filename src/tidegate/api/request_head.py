"""Checks on the head of a request. Anything that two parsers could read differently is refused, on both paths.

A proxy and this server must agree on where a request ends and on whose it is (request smuggling). The parser
(httptools) refuses most of what they could disagree about; this module refuses the rest.
"""

from __future__ import annotations

import httptools

from tidegate.api.problems import Problem

MAX_HEAD_BYTES = 32 * 1024
Headers = list[tuple[bytes, bytes]]

# Headers that may occur once: of two, one parser would use the first and another the last.
_ONCE = frozenset(
    {
        b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"host",
        b"transfer-encoding",
    }
)  # fmt: skip

_LINES_END = "a line does not end with CR LF"
_ADDRESS = "its address is not a path, or contains a character that must be percent-encoded"
# Explanations for the parser's messages that do not say enough to fix the request.
_FAULTS = {
    "Invalid method encountered": "it does not begin with an HTTP method, such as GET or POST",
    "Expected HTTP/, RTSP/ or ICE/": "its first line does not end with HTTP/1.1; is there a space in the address?",
    "Invalid HTTP version": "its version is not HTTP/1.1",
    "Pause on PRI/Upgrade": "it is HTTP/2, which is not supported; send HTTP/1.1",
    "Invalid header token": "a header name is empty or contains an invalid character, such as a space before the colon",
    "Unexpected whitespace after header value": "the value of a header continues on a second line; send it on one line",
    "Unexpected space after start line": "the first header begins with a space",
    "Invalid header value char": "the value of a header contains a control character",
    "Invalid header field char": _LINES_END,
    "Expected CRLF after version": _LINES_END,
    "Missing expected CR after header value": _LINES_END,
    "Missing expected LF after header value": _LINES_END,
    "Expected LF after headers": _LINES_END,
    "Invalid character in Content-Length": "content-length is not a number; send it once, in decimal digits",
}
_TLS = "it is TLS, and this port serves HTTP without TLS; use http://, or the address of the proxy that terminates TLS"
_TLS_HANDSHAKE = 0x16


def refusal(method: bytes, version: str, url: bytes, headers: Headers) -> Problem | None:
    """Why this head is refused; None when it is accepted."""
    size, seen, coding = len(url), set[bytes](), None
    for name, value in headers:
        size += len(name) + len(value) + 4
        if name in _ONCE:
            if name in seen:
                return Problem(400, f"the header {name.decode()} occurs more than once; send it once")
            seen.add(name)
            if name == b"transfer-encoding":
                coding = value
    if size > MAX_HEAD_BYTES:
        return too_large()
    if version == "1.1":
        if b"host" not in seen:
            return Problem(400, "the header host is missing; HTTP/1.1 requires it")
    elif version != "1.0":
        return Problem(400, f"HTTP/{version} is not supported; send HTTP/1.1")
    if coding is not None and (coding.strip().lower() != b"chunked" or version == "1.0"):
        return Problem(400, "the only supported transfer encoding is chunked, in HTTP/1.1; or send Content-Length")
    if method == b"CONNECT":
        return Problem(405, "CONNECT is not supported; this server is not a proxy")
    return None


def too_large() -> Problem:
    return Problem(431, f"the address and the headers are larger than {MAX_HEAD_BYTES} bytes")


def unreadable(fault: httptools.HttpParserError, data: bytes) -> Problem:
    """Why the parser stopped: an explanation of ours or its own message, never text of the sender."""
    cause = fault.__context__  # what a callback raised while the head was parsed
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
    """The head again, without the header `Upgrade`."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(lines))
