"""Text for others to read, without the secrets that addresses carry."""

from __future__ import annotations

import re

# A password in an address, or what a query string calls a token: libraries like to repeat them in their errors.
_IN_ADDRESS = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+(?=@)")
_IN_QUERY = re.compile(r"(?i)\b(password|passwd|token|secret|api_?key|access_token)=[^&\s'\"]+")
# API tokens and the secrets of webhooks, wherever they come up.
_SECRET = re.compile(r"\b(tg_|whsec_)[0-9A-Za-z+/]{20,}={0,2}")
# The database's own words about a row that it refuses: they repeat the row.
_DETAIL = re.compile(r"\nDETAIL:.*?(?=\n\n|\nHINT:|\Z)", re.DOTALL)


def masked(text: str) -> str:
    """The text without the passwords and tokens of addresses in it, nor the rows of the database's errors."""
    if "://" in text:
        text = _IN_ADDRESS.sub(r"\1:[hidden]", text)
    if "\nDETAIL:" in text:
        text = _DETAIL.sub("\nDETAIL: [hidden]", text)
    if "tg_" in text or "whsec_" in text:
        text = _SECRET.sub(r"\1[hidden]", text)
    return _IN_QUERY.sub(r"\1=[hidden]", text) if "=" in text else text
