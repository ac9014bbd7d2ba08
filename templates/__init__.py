"""Kernel templates: one module per kernel and architecture family, each with a `TEMPLATE`."""
