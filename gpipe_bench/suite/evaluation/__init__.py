"""From raw results to tables, statistics, comparisons and verdicts."""
