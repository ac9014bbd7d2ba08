"""Tuning database: every trial, the best rows, and the lookup that the runtime uses.

Import order inside: records, schema, store, jsonl, lookup, layers, merge.  Imports neither TileLang nor Optuna.
"""

from .layers import Database, open_db
from .lookup import Match, TuningWarning
from .records import ALL_WORKLOADS, STATUSES, BestRow, CostModel, Environment, Times, Trial
from .store import Store

__all__ = [
    "ALL_WORKLOADS",
    "STATUSES",
    "BestRow",
    "CostModel",
    "Database",
    "Environment",
    "Match",
    "Store",
    "Times",
    "Trial",
    "TuningWarning",
    "open_db",
]
