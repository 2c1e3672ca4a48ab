"""What gradients look like in a number format: exponents, and the share lost to zero."""

from lossscale.diagnostics.exponents import ExponentHistogram as ExponentHistogram
from lossscale.diagnostics.exponents import exponent_histogram as exponent_histogram
from lossscale.diagnostics.flushing import share_flushed as share_flushed
from lossscale.diagnostics.flushing import share_zeroed as share_zeroed
from lossscale.diagnostics.formats import BFLOAT16 as BFLOAT16
from lossscale.diagnostics.formats import FLOAT8_E4M3FN as FLOAT8_E4M3FN
from lossscale.diagnostics.formats import FLOAT8_E5M2 as FLOAT8_E5M2
from lossscale.diagnostics.formats import FLOAT16 as FLOAT16
from lossscale.diagnostics.formats import FORMATS as FORMATS
from lossscale.diagnostics.formats import NumberFormat as NumberFormat
from lossscale.diagnostics.formats import number_format as number_format
