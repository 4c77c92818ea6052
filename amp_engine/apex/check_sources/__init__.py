"""`--check`: reads the sources of a project and says what they use of apex, and what answers to it here."""
