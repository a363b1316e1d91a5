"""Files: raw results, tables and traces, whole or absent, and what was finished before a job was cut off."""
