"""Overflows: noted as they come, explained afterwards, and looked for in one batch."""
