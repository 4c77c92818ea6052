"""What explains, compares and audits a run; loaded when it is called, as the rest of the package imports none of it."""
