"""Tables of results: their columns, the rows of each kind of experiment, reading, writing, statistics."""
