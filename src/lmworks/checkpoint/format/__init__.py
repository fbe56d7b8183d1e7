"""What a checkpoint is on disk: a folder, a manifest of its files, a marker. Imports no torch."""
