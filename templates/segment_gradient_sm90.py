"""`backward_state_sm90` on the segments of cut sequences, for the gradient of the state that enters each, and no more.

What a segment adds to the gradient of the state before it, from where its own is known: the end of the sequence, or
zero as many chunks behind it as the gates ask for (a window, as in the forward, from the other end); from zero where it
is known to `segment_gradient_correct` only.  `ends[segment, head]` says which: 0, chunks, or −1.  The result lies in
the rows of `dv` of the segment before (`segments_sm90`), and is not made where that segment has a window of its own.
"""

from dataclasses import replace

from . import backward_state_sm90

TEMPLATE = replace(
    backward_state_sm90.TEMPLATE,
    kernel="segment_gradient",
    name="segment_gradient_sm90",
    sources=("segment_gradient_sm90.py", "segments_sm90.py", *backward_state_sm90.TEMPLATE.sources),
)
