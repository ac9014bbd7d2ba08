"""`fused_forward_sm90` on the segments of split sequences: the same kernel, started and ended elsewhere.

A segment starts from the sequence's initial state, from the state that `segment_state` and `segment_correct` left in
its rows of `o`, or from zero as many chunks ahead as its window asks for; `starts` says which.  Outputs of those chunks
are not stored.  Only a sequence's last segment leaves a final state.

It waits for all that came before (programmatic dependent launch), because `starts` decides where it reads.
"""

from dataclasses import replace

from . import fused_forward_sm90

TEMPLATE = replace(
    fused_forward_sm90.TEMPLATE,
    kernel="segment_forward",
    name="segment_forward_sm90",
    sources=("segment_forward_sm90.py", "segments_sm90.py", *fused_forward_sm90.TEMPLATE.sources),
)
