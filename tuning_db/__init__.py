"""Shipped tuning rows (``<arch>.jsonl``) and the recorded sweeps they were chosen from (``sweeps/``)."""
