"""What explains, compares and audits a run; loaded when it is called, and imported by nothing else."""
