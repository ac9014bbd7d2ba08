"""When the last of many independent jobs ends, if the longest that is left always starts on the machine free first.

That is the order in which a grid of CTAs, long ones first, fills the SMs of a card.  Jobs come as groups of equal ones
and are placed a whole group at a time, so the time of this does not grow with their number.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

#: Groups so short beside an even share of all work are not placed one by one: the end is known to half of one job.
_SHORT_SHARE = 32


def makespan(groups: Iterable[tuple[int, int]], machines: int) -> float:
    """End of the last job, in the unit of durations.  groups: (duration, count), both whole numbers.

    Exact for one group, and where no other than the last group's jobs are shorter than 1/32 of an even share of all
    work; else within 1/64 of that schedule's end.
    """
    jobs = sorted(((duration, count) for duration, count in groups if duration and count), reverse=True)
    if not jobs:
        return 0.0
    if len(jobs) == 1:
        return float(jobs[0][0] * -(-jobs[0][1] // machines))
    share = sum([duration * count for duration, count in jobs]) / machines
    levels: list[tuple[int, int]] = [(0, machines)]  # (load, machines that have it), ascending
    last = len(jobs) - 1
    for place, (duration, count) in enumerate(jobs):
        top = float(levels[-1][0])
        if top >= share + duration:  # whoever is free first is so before `share`: no later job ends after `top`
            return top
        if place < last and duration * _SHORT_SHARE <= share:
            return max(top, share + duration / 2)
        levels = _placed(levels, duration, count)
    return float(levels[-1][0])


def _placed(levels: list[tuple[int, int]], duration: int, count: int) -> list[tuple[int, int]]:
    """The loads after ``count`` jobs of one duration, each on a machine of least load."""
    if len(levels) == 1:
        (load, machines), rounds = levels[0], count // levels[0][1]
        below, rest = load + rounds * duration, count - rounds * machines
        return [(below, machines - rest), (below + duration, rest)] if rest else [(below, machines)]
    # Poured like water, the work would reach `surface`.  Whoever is free a whole job earlier takes jobs up to there in
    # any case, so those are placed at once; at most two a machine are left for the loop.
    poured, machines, surface = duration * count, 0, 0
    for place, (load, number) in enumerate(levels):
        poured, machines = poured + load * number, machines + number
        surface = poured // machines
        if place + 1 == len(levels) or surface <= levels[place + 1][0]:
            break
    loads: dict[int, int] = {}
    for load, number in levels:
        rounds = -(-(surface - duration - load) // duration)
        if rounds > 0:
            count -= rounds * number
            load += rounds * duration
        loads[load] = loads.get(load, 0) + number
    heap = list(loads)
    heapq.heapify(heap)
    while count:
        load = heap[0]
        taken = min(loads[load], count)
        count -= taken
        loads[load] -= taken
        if not loads[load]:
            heapq.heappop(heap)
            del loads[load]
        ended = load + duration
        if ended not in loads:
            loads[ended] = 0
            heapq.heappush(heap, ended)
        loads[ended] += taken
    return sorted(loads.items())
