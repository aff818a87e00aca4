"""The rows of int8; see :mod:`manyhands.averaging.codecs.int8`."""

ROW_NUMEL = 216
"""With more values in a row, the squared error on N(0,1) is above 4e-5; with fewer, there are more than 8.3 bits."""

HEADER_BYTES = 8
LEVELS = 255
KERNEL_EPSILON = 1e-8
SMALL_SCALE = 2.0**-30
HUGE_SCALE = 2.0**118
HUGE_BIAS = 2.0**126
UNUSED_SCALE_BITS = 0xFF
