"""Names in a drawing that are too long."""

from hypothesis import given
from hypothesis import strategies as st

from lossscale.plots.labels import shortened


@given(
    st.lists(st.text("ab/", min_size=1, max_size=60), max_size=12, unique=True),
    st.integers(16, 40),
)
def test_shortened_names_fit_and_stay_different(names, length):
    found = shortened(names, length)
    assert len(found) == len(names) == len(set(found))
    for name, short in zip(names, found, strict=True):
        assert len(short) <= length
        assert short == name if len(name) <= length else "…" in short
