"""Incidents planted in a real local fleet under load: what users see, which alert fires, whether its runbook helps."""
