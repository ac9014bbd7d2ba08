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
    jobs = sorted([(duration, count) for duration, count in groups if duration and count], reverse=True)
    if not jobs:
        return 0.0
    if len(jobs) == 1:
        return float(jobs[0][0] * -(-jobs[0][1] // machines))
    share = sum([duration * count for duration, count in jobs]) / machines
    loads, heap = {0: machines}, [0]  # machines by load, and the loads as a heap
    top, last = 0, len(jobs) - 1
    for place, (duration, count) in enumerate(jobs):
        if top >= share + duration:  # whoever is free first is so before `share`: no later job ends after `top`
            break
        if place < last and duration * _SHORT_SHARE <= share:
            return max(float(top), share + duration / 2)
        if count > machines:
            loads, count = _whole_rounds(loads, duration, count)
            heap = sorted(loads)
            top = heap[-1]
        while count:
            load = heap[0]
            taken = loads[load]
            if taken > count:
                loads[load] = taken - count
                taken = count
            else:
                heapq.heappop(heap)
                del loads[load]
            count -= taken
            end = load + duration
            if end in loads:
                loads[end] += taken
            else:
                loads[end] = taken
                heapq.heappush(heap, end)
                top = max(top, end)
    return float(top)


def _whole_rounds(loads: dict[int, int], duration: int, count: int) -> tuple[dict[int, int], int]:
    """Most of ``count`` jobs of one duration placed at once: the loads then, and how many jobs are left.

    Poured like water, the work would reach `surface`.  Whoever is free a whole job earlier takes jobs up to there in
    any case; at most two a machine are left.
    """
    levels = sorted(loads.items())
    poured, machines, surface = duration * count, 0, 0
    for place, (load, number) in enumerate(levels):
        poured, machines = poured + load * number, machines + number
        surface = poured // machines
        if place + 1 == len(levels) or surface <= levels[place + 1][0]:
            break
    placed: dict[int, int] = {}
    for load, number in levels:
        rounds = -(-(surface - duration - load) // duration)
        if rounds > 0:
            count -= rounds * number
            load += rounds * duration
        placed[load] = placed.get(load, 0) + number
    return placed, count
