"""Digests of what the simulator gives for thousands of runs, so that another implementation can be held against them.

    python -m tests.simulator.digests store      stores the digests of every group that has none yet
    python -m tests.simulator.digests compare    runs every case and says which differ, and in which field

A group is either a list of cases or a command of the package, whose calls of ``run`` are its cases. A line of
``stored/<group>.csv.gz`` is a case; :mod:`tests.simulator.digests.digest` says what its columns are.
"""
