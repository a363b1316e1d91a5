# The workflow stands where catalogues of workflows and snakedeploy look for it.
include: "workflow/Snakefile"
