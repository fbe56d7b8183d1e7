"""The planner: memory, step time and cost. Reads a spec, predicts; imports only `spec`, never torch."""
