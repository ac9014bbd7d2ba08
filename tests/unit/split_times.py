"""An evaluator without a GPU for the kernels of a split: times follow from depth and CTAs by known coefficients."""

from __future__ import annotations

from tuning_fakes import ENVIRONMENT, FakeEvaluator, trial

from qla_jit.model.features import Split, num_ctas, steps
from qla_jit.registry import digest
from qla_jit.tune.evaluate import now
from qla_jit.workload import workload_of

#: µs of a step, of a CTA and of the launch.
COEFFICIENTS = {
    "kkt_inverse": (1.2, 0.02, 4.0),
    "fused_forward": (1.8, 0.05, 8.0),
    "segment_state": (1.35, 0.05, 8.0),
    "segment_correct": (0.7, 0.02, 5.0),
    "segment_forward": (1.85, 0.05, 9.0),
}


def time_us(problem, schedule, workload: str) -> float:
    asked = workload_of(problem.kernel, workload)
    work = (problem, schedule, asked.lengths)
    a, b, c = COEFFICIENTS[problem.kernel]
    split = Split.of(asked)
    return a * steps(*work, ENVIRONMENT.sm_count, split) + b * num_ctas(*work, split) + c


def timed(problem, schedule, workload: str, **changes):
    median_us = time_us(problem, schedule, workload)
    values = dict(samples_us=(median_us,), template_digest=digest(schedule.template), created=now())
    return trial(schedule, problem_=problem, workload=workload, **{**values, **changes})


class ModelEvaluator(FakeEvaluator):
    """Takes the times of trials from `time_us`."""

    def evaluate(self, problem, workload, schedule, deadline=None, search_s=0.0):
        self.asked.append(schedule)
        return timed(problem, schedule, workload)

    def race(self, problem, workload, schedules, rounds):
        self.raced.append(list(schedules))
        return [timed(problem, schedule, workload, phase="final") for schedule in schedules]
