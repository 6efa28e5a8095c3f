"""Permanent rows: one for each live request, claimed when it arrives and freed when it leaves."""
