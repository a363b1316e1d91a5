"""From a configuration to rows: cells, one measured cell in a fresh process, tables, statistics, the terminal summary.

Nothing here imports PyTorch before a cell is measured, so that a workflow and ``--help`` start at once.
"""
