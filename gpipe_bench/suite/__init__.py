"""From a configuration to rows: cells, one measured cell in a fresh process, tables, statistics, the terminal summary.

Nothing here imports PyTorch before a cell is measured, so that a workflow and ``--help`` start at once. Each folder
imports those above it in this list, and the modules beside it: settings, cells with their names, the devices that there
are.

    storage         files, raw results, tables, traces
    running         cells at work, each in a fresh process
    published       what others published, and their tables run again
    datapackage     the descriptor of a folder of results
    evaluation      from raw results to tables, statistics, comparisons and verdicts
    advice          the best settings of a model, by simulation
    experiments     the configuration of the suite, and what the workflow makes of it
"""
