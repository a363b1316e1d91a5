"""Times of pipelines whose order of issue is known beforehand, without the clock."""
