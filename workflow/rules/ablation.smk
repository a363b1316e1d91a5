# What each component of the pipeline brings: every combination simulated and emulated on the devices of the published
# runs, and measured on the GPUs here; on a CPU, pipelines beside the plain loop.


rule timeline:
    """One step of each published variant as figure and trace, for each kind of evidence."""
    input:
        PLAN.pictures("ablation", kind="timelines"),
        expand(
            "results/traces/ablation/{variant}.json",
            variant=PLAN.published("ablation"),
        ),
        expand(
            "results/traces/ablation/simulated_{variant}.json",
            variant=PLAN.published("ablation", "simulated"),
        ),
        expand(
            "results/traces/ablation/emulated_{variant}.json",
            variant=PLAN.published("ablation", "emulated"),
        ),


rule ablation:
    """Table, figures, and timeline figure and trace of each published variant."""
    input:
        expand(
            "results/ablation{table}.csv",
            table=["", "_devices", "_steps", "_events", "_configurations"],
        ),
        PLAN.pictures("ablation"),
        rules.timeline.input,
