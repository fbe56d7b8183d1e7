"""Tenants of the gateway: who asks, what each may use, and what each has used."""
