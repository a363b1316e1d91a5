"""Studies: questions that the suite answers with its own tools, a folder each; none is part of the package."""
