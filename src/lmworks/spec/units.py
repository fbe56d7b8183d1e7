"""Units of sizes as people write them, in capitals."""

from __future__ import annotations

BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BYTES |= {f"{letter}IB": size for letter, size in BYTES.items() if letter}
BYTES |= {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
