"""The memory of a rank: row by row for our own trainer, in closed form for thousands of layouts of anybody's."""
