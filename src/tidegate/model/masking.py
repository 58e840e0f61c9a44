"""Removes secrets from text that is logged or shown."""

from __future__ import annotations

import re

# A password in a URL, or a token in a query string: errors of libraries often contain them.
_IN_ADDRESS = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+(?=@)")
_IN_QUERY = re.compile(r"(?i)\b(password|passwd|token|secret|api_?key|access_token)=[^&\s'\"]+")
# API tokens and webhook secrets, anywhere in the text.
_SECRET = re.compile(r"\b(tg_|whsec_)[0-9A-Za-z+/]{20,}={0,2}")
# The detail of a database error: it contains values of the row.
_DETAIL = re.compile(r"\nDETAIL:.*?(?=\n\n|\nHINT:|\Z)", re.DOTALL)


def masked(text: str) -> str:
    """The text without passwords, tokens and secrets, and without row values from database errors."""
    if "://" in text:
        text = _IN_ADDRESS.sub(r"\1:[hidden]", text)
    if "\nDETAIL:" in text:
        text = _DETAIL.sub("\nDETAIL: [hidden]", text)
    if "tg_" in text or "whsec_" in text:
        text = _SECRET.sub(r"\1[hidden]", text)
    return _IN_QUERY.sub(r"\1=[hidden]", text) if "=" in text else text
