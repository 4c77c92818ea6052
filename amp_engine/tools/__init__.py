"""Explains, compares and audits a run. Each module is loaded when it is called; the core imports none."""
