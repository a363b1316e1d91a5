"""Files: raw results, tables and traces, whole or absent, and finished parts of an interrupted job."""
