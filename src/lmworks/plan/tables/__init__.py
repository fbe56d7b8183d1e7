"""Other people's tables: read as jobs, predicted row by row, and held against what was measured."""
