"""`backward_state_sm90` on the segments of cut sequences: the same kernel, started and ended elsewhere.

A segment starts from the gradient of the sequence's final state, from the one that `segment_gradient` and
`segment_gradient_correct` left in its rows of `dv`, or from zero as many chunks behind it as its window asks for;
`ends` says which.  What those chunks give is not stored.  Only a sequence's first segment leaves the gradient of the
initial state.
"""

from dataclasses import replace

from . import backward_state_sm90

TEMPLATE = replace(
    backward_state_sm90.TEMPLATE,
    kernel="segment_backward",
    name="segment_backward_sm90",
    sources=("segment_backward_sm90.py", "segments_sm90.py", *backward_state_sm90.TEMPLATE.sources),
)
