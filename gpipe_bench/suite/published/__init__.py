"""What others published: their values as rows, and their tables run again."""
