"""Files: raw results and tables, whole or absent."""
