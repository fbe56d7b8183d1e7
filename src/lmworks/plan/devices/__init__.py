"""What an accelerator and its links do in a given time: measured, fitted to measurements, or by a datasheet."""
