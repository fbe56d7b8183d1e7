"""The memory of a rank: row by row, of one run or of thousands of candidates at once."""
