"""Codecs of the all-reduce: float values to fewer bytes, and back the same way on every machine."""

from manyhands.averaging.codecs.codec import BadEncoding, Codec, NotFinite, check_finite, is_finite, square_of
from manyhands.averaging.codecs.error_feedback import ErrorFeedback, Feedbacks
from manyhands.averaging.codecs.kernels import prepare as prepare_kernels
from manyhands.averaging.codecs.plan import (
    ABSENT,
    BF16,
    CODECS,
    EXACT_BELOW_NUMEL,
    FP16,
    INT4,
    INT8,
    NONE,
    NONE_FLOAT64,
    Chosen,
    Gathered,
    Plan,
    Segment,
    Uncompared,
    codec_named,
    codec_of_code,
    plan_of,
)
from manyhands.averaging.codecs.sparse import Sparse

__all__ = [
    "ABSENT",
    "BF16",
    "CODECS",
    "EXACT_BELOW_NUMEL",
    "FP16",
    "INT4",
    "INT8",
    "NONE",
    "NONE_FLOAT64",
    "BadEncoding",
    "Chosen",
    "Codec",
    "ErrorFeedback",
    "Feedbacks",
    "Gathered",
    "NotFinite",
    "Plan",
    "Segment",
    "Sparse",
    "Uncompared",
    "check_finite",
    "codec_named",
    "codec_of_code",
    "is_finite",
    "plan_of",
    "prepare_kernels",
    "square_of",
]
