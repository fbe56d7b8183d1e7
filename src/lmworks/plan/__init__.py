"""Floor 1: the arithmetic of memory and time. Reads a spec, predicts; imports only `spec`, never torch."""
