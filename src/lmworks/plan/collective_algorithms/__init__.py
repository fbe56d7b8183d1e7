"""Algorithms of collectives: their schedules as data, their rounds and bytes, their time on a cluster."""
