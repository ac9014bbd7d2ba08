"""Offline tuning: enumerate, compile, verify, measure, store.  Nothing here is imported by the runtime.

Import order inside, each line needing only what stands above it:

    space, environment, clocks, roofline, child, channel, lanes, compile_child, compile_pool, measure, worker_child,
    worker, cards, static_filter, evaluate, replay, search, unit, board, shared_board, search_round, finals, races,
    last_sweep, activities, sweep
    compile_only, doctor, explain, replay_study, shipped_plan, verify_rows, importance, report_models, boundary,
    report_data
    picture, progress, report_style, report_charts, report_tables, report_boundary, report, json_output, tables,
    explain_output, plan_output, options
    the verbs: fit, inspect, record, replay, report and verify _commands, commands
"""
