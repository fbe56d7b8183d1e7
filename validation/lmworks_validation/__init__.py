"""The planner against measurements of other people: their tables, read and replayed."""
