"""The commands, one file a group. Parse, call one function, print; torch is imported inside a command."""
