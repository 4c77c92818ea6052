"""`--check`: reads a project's sources and lists its uses of apex, each with the answer to it here."""
