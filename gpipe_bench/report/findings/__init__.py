"""What the results say, in sentences: computed from the rows of a report, each with its evidence and hardware."""
