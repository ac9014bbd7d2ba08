"""`recompute_state_sm90` on the segments of cut sequences: the same kernel, started elsewhere.

A segment starts as in `segment_forward_sm90`, with `effects` in the place of `o`: `segment_state` and
`segment_correct` ran with it.  What the chunks of a warm-up give is not stored.
"""

from dataclasses import replace

from . import recompute_state_sm90

TEMPLATE = replace(
    recompute_state_sm90.TEMPLATE,
    kernel="segment_recompute",
    name="segment_recompute_sm90",
    sources=("segment_recompute_sm90.py", "segments_sm90.py", *recompute_state_sm90.TEMPLATE.sources),
)
