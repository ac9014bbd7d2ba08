"""`segment_correct_sm90` from the other end: dS of the state that enters a segment, over the segments of a sequence.

    dSᵀ(r − 1) ← γ_r dSᵀ(r) + dSᵀ(r) D_r + dS*_rᵀ

dS(r) is the gradient of the state that leaves segment r.  `segment_gradient` left dS* in the rows of `dv` where
dS(r − 1) belongs, and `ends` says which of them only this scan knows (−1).  D lies in rows of `effects`, where
`segment_state` left it.
"""

from dataclasses import replace

from . import segment_correct_sm90

TEMPLATE = replace(
    segment_correct_sm90.TEMPLATE,
    kernel="segment_gradient_correct",
    name="segment_gradient_correct_sm90",
    sources=("segment_gradient_correct_sm90.py", *segment_correct_sm90.TEMPLATE.sources),
)
