# Every schedule on the same devices: simulated on two types of device, emulated and measured for some.


rule schedules:
    """Throughput, memory, bubble and timelines of every schedule: tables and figures."""
    input:
        expand("results/schedules{table}.csv", table=["", "_devices", "_timelines", "_timelines_events"]),
        PLAN.pictures("schedules", "schedules_timelines"),
