# Numbers of partitions and micro-batches: simulated at scale, emulated at some points, measured as far as the devices of
# this machine go.


rule sweep:
    """Every sweep of the configuration: tables, maps of throughput, and where device time goes."""
    input:
        expand("results/{sweep}.csv", sweep=PLAN.sweeps),
        PLAN.pictures(*PLAN.sweeps),


rule processes:
    """The sweep over processes: table and maps of throughput."""
    input:
        "results/sweep_processes.csv",
        PLAN.pictures("sweep_processes", kind="sweep"),
