"""A whole run of a workload on a machine: by the clock, or a shorter way where there is one."""
