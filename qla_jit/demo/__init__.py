"""The main job end to end, on a card or without one: ``python -m qla_jit.demo``.

Import order inside: layer, peers, tables, stages.  Needs the extra ``tune``.
"""
