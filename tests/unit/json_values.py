"""What JSON can say, for generated examples."""

from typing import Any

from hypothesis import strategies as st

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


def nested(leaves: st.SearchStrategy[Any], max_leaves: int = 20) -> st.SearchStrategy[Any]:
    """Leaves in arrays and objects."""
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
        max_leaves=max_leaves,
    )


JSON = nested(SCALARS)
EVENTS = st.fixed_dictionaries(
    {"type": st.text(max_size=10), "payload": st.dictionaries(st.sampled_from(["a", "b", "items"]), JSON)}
)
