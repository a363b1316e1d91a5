# Networks of today beside the same ones without their residuals: every schedule, and every component.

RESIDUALS = ["residuals", "residuals_float32", "residuals_components"]


rule residuals:
    """What attention residuals cost in every schedule, with and without shared copies: tables and figures."""
    input:
        expand("results/{table}.csv", table=RESIDUALS),
        PLAN.pictures(*RESIDUALS),
