# The published tables of speed and memory: printed values beside simulated and emulated ones, and measured where there
# are the GPUs.


rule speed:
    """Throughput of U-Net (5, 64) and AmoebaNet-D (18, 256): table and figure."""
    input:
        expand("results/speed{table}.csv", table=["", "_devices", "_steps", "_configurations"]),
        PLAN.pictures("speed"),


rule memory:
    """Memory of the largest models that fit: table and figure."""
    input:
        expand("results/memory{table}.csv", table=["", "_devices", "_steps", "_configurations"]),
        PLAN.pictures("memory"),
