"""Offline tuning: enumerate, compile, verify, measure, store.  Nothing here is imported by the runtime.

Import order inside: workload, space, environment, child, channel, compile_child, compile_pool, measure, worker_child,
worker, evaluate, replay, search, finals, last_sweep, sweep, picture, progress, doctor, tables, options,
inspect_commands, record_commands, commands.
"""
