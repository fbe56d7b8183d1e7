"""What servers and gateway show of themselves: one list of metrics, and what is made from it."""
