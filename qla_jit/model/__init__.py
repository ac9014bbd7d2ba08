"""Cost models: what a kernel's time depends on, and the fit of it from database rows.

Import order inside: makespan, features, robust, observation, split_rows, fit.  Only `robust` imports NumPy; the runtime
needs `makespan` and `features` alone.
"""
