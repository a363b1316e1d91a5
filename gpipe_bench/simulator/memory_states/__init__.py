"""Peaks of memory of pipelines whose times are known: what a pass does is found out once, and looked up."""
