"""The address that a client is given."""

from __future__ import annotations

import pytest

from tidegate import AsyncClient, Client
from tidegate.errors import InvalidInput


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("url", ["http://127.0.0.1:1\nhttp://other", "http://127.0.0.1:port"])
def test_an_address_that_is_none_is_refused_by_name(kind: type[Client] | type[AsyncClient], url: str) -> None:
    with pytest.raises(InvalidInput, match="the address of the API is not valid") as refused:
        kind(url)
    assert [error.field for error in refused.value.errors] == ["url"]
