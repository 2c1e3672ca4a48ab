"""What hypothesis draws rules from."""

import math

from hypothesis import strategies as st

from lossscale.rules import LONGEST_INTERVAL, DynamicScale

# By exponent: drawn as plain floats, nearly all scales would lie at the upper end.
scales = st.builds(math.ldexp, st.floats(1, 2, exclude_max=True), st.integers(-126, 125)) | (
    st.integers(-126, 126).map(lambda exponent: 2.0**exponent)
)
# Factors that float32 does not round to 1, infinity or a subnormal number; those are refused.
growth_factors = st.sampled_from([2.0, 4.0, 1.5]) | st.floats(1 + 2.0**-23, 3.4e38)
backoff_factors = st.sampled_from([0.5, 0.25, 0.8]) | st.floats(2.0**-126, 1 - 2.0**-24)
intervals = st.integers(1, 6) | st.integers(1, LONGEST_INTERVAL)


@st.composite
def dynamic_scales(draw):
    lowest, first, highest = sorted(draw(st.tuples(scales, scales, scales)))
    return DynamicScale(
        initial_scale=first,
        growth_interval=draw(intervals),
        growth_factor=draw(growth_factors),
        backoff_factor=draw(backoff_factors),
        min_scale=lowest,
        max_scale=draw(st.sampled_from([highest, None])),
    )
